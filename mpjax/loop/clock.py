"""Time spent training, apart from compiling, evaluating and saving."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Counts seconds, except while paused."""

    def __init__(self):
        self._start = time.perf_counter()
        self._paused = 0.0

    def seconds(self) -> float:
        """Seconds since the start, pauses left out."""
        return time.perf_counter() - self._start - self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out what happens within."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start
