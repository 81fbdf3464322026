"""Child processes that do not outlive their parent."""

import ctypes
import signal
import sys


def die_with_parent() -> None:
    """For `preexec_fn`: a child whose parent is killed ends too (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
