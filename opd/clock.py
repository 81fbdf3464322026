"""Wall time of the stages of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by stage. Stages inside one another both count."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        """Seconds by stage since the last reading, as `perf/<stage>_s`."""
        seconds = {f"perf/{stage}_s": round(value, 4) for stage, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
