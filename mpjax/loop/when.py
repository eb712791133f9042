"""Intervals: which steps end with logging, evaluation or a checkpoint, and how many steps each compiled call runs."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class When:
    """Intervals in attempted steps. An event is also due at the last step, with 0 only there.

    Layer statistics are the exception: they are due at their interval alone, and with 0 never.

    Attributes:
      steps: the number of steps in training.
      log: interval between lines of metrics.
      evaluate: interval between evaluations.
      save: interval between checkpoints.
      layers: interval between layer statistics.
      per_call: largest number of steps in one compiled call.
    """

    steps: int
    log: int
    evaluate: int
    save: int
    layers: int = 0
    per_call: int = 1

    def due(self, interval: int, position: int) -> bool:
        """True if an event with this interval is due after step number `position` (the first step is 1)."""
        return position == self.steps or (interval > 0 and position % interval == 0)

    def layers_due(self, position: int) -> bool:
        """True if layer statistics are measured in step number `position`."""
        return self.layers > 0 and position % self.layers == 0

    def call_at(self, position: int) -> int:
        """The number of steps in the call after step number `position`: `per_call` or 1.

        A halt is a position where the state is evaluated, saved or needed for layer statistics, or the last. Each call
        ends at the next halt or before it. Steps before a halt that do not fill a call run one by one. Calls are
        counted from the previous halt, so that a resumed run makes the same calls as an uninterrupted one.
        """
        before, after = self._halts_around(position)
        fits = position + self.per_call <= after
        return self.per_call if fits and (position - before) % self.per_call == 0 else 1

    def call_counts(self, start: int) -> Iterator[int]:
        """Yields the number of steps of every call from step number `start` + 1 to the end.

        >>> list(When(steps=12, log=1, evaluate=7, save=10, per_call=3).call_counts(0))  # halts at 7, 10 and 12
        [3, 3, 1, 3, 1, 1]
        """
        position = start
        while position < self.steps:
            count = self.call_at(position)
            yield count
            position += count

    def kinds_of_calls(self, start: int) -> set[int]:
        """The distinct numbers of steps per call from step number `start` + 1 to the end."""
        possible, kinds = {1, self.per_call}, set()
        for count in self.call_counts(start):
            kinds.add(count)
            if kinds == possible:
                break
        return kinds

    def advice(self, start: int) -> str:
        """Says that `per_call` has no effect, and what to write instead, for a run that starts after step `start`.

        It is empty if a call of the run has `per_call` steps, or if no step is left.
        """
        if start >= self.steps or self.per_call in self.kinds_of_calls(start):
            return ""
        position, longest = start, 0
        while position < self.steps:
            after = self._halts_around(position)[1]
            position, longest = after, max(longest, after - position)
        return (
            f"--training.steps_per_call {self.per_call} does nothing: evaluations, checkpoints and statistics of "
            f"layers are at most {longest} steps apart; write {longest} or fewer, or lengthen these intervals"
        )

    def _halts_around(self, position: int) -> tuple[int, int]:
        """The last halt up to `position`, which may be 0, and the first after it, which may be `steps`."""
        intervals = [n for n in (self.evaluate, self.save) if n > 0]
        before = [position // n * n for n in intervals]
        after = [position // n * n + n for n in intervals]
        if self.layers > 0:  # the state is needed before the step whose layers are measured
            number = (position + 1) // self.layers * self.layers
            before.append(number - 1)
            after.append(number + self.layers - 1)
        return max([0, *before]), min([self.steps, *after])
