"""An update holds a chunk of logits, whatever the number of its tokens."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("form", ["full", "topk", "sampled"])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_memory_grows_with_the_backbone_alone(form):
    """400 rows of 200,000 columns are 305 MiB in fp32, and their softmax as much again.

    Of 24 MiB are the gradients of embeddings and head; chunks take 8 each, scratch in cache 15. A token of this backbone
    takes less than 10 KiB.
    """
    script = str(Path(__file__).with_name("step_memory.py"))
    done = subprocess.run([sys.executable, script, form, "400"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 100
