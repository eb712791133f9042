"""Estimates the remaining time of a run."""

from collections.abc import Callable


class Pace:
    """Estimates the remaining time from the steps since the first report, which exclude compilation."""

    def __init__(self, total_steps: int, clock: Callable[[], float]):
        self._total_steps, self._clock = total_steps, clock
        self._first: tuple[int, float] | None = None

    def remaining(self, step: int) -> float | None:
        """Returns the estimated seconds from `step` to the end; None at the first report."""
        if step >= self._total_steps:
            return 0.0
        now = self._clock()
        first_step, first_time = self._first = self._first or (step, now)
        if step <= first_step:
            return None
        return (self._total_steps - step) * (now - first_time) / (step - first_step)
