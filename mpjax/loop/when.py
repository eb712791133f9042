"""When something is due: every so many steps, and at the end."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class When:
    """Intervals in attempted steps; 0: only at the end, and for layers never.

    Attributes:
      steps: length of training.
      log: between lines of metrics.
      evaluate: between evaluations.
      save: between checkpoints.
      layers: between statistics of the layers.
      per_call: steps in one compiled call, at most.
    """

    steps: int
    log: int
    evaluate: int
    save: int
    layers: int = 0
    per_call: int = 1

    def due(self, interval: int, position: int) -> bool:
        """Whether something with this interval happens after step number `position` (the first is 1)."""
        return position == self.steps or (interval > 0 and position % interval == 0)

    def layers_due(self, position: int) -> bool:
        """Whether step number `position` is one whose layers are looked at."""
        return self.layers > 0 and position % self.layers == 0

    def call_at(self, position: int) -> int:
        """Steps in the call that begins after step number `position`: `per_call`, or 1 where that would pass a halt.

        A halt is where the state is looked at: evaluated, saved, its layers measured. Calls are counted from the halt
        before, so that those of a resumed run are those of an undisturbed one.
        """
        before, after = self._halts_around(position)
        fits = position + self.per_call <= after
        return self.per_call if fits and (position - before) % self.per_call == 0 else 1

    def call_counts(self, start: int) -> Iterator[int]:
        """The steps of every call from step number `start` + 1 to the end."""
        position = start
        while position < self.steps:
            count = self.call_at(position)
            yield count
            position += count

    def kinds_of_calls(self, start: int) -> set[int]:
        """The numbers of steps that calls have from step number `start` + 1 to the end."""
        possible, kinds = {1, self.per_call}, set()
        for count in self.call_counts(start):
            kinds.add(count)
            if kinds == possible:
                break
        return kinds

    def advice(self, start: int) -> str:
        """What to say of a `per_call` that no call from step number `start` + 1 on has; else nothing."""
        if start >= self.steps or self.per_call in self.kinds_of_calls(start):
            return ""
        position, longest = start, 0
        while position < self.steps:
            after = self._halts_around(position)[1]
            position, longest = after, max(longest, after - position)
        return (
            f"--training.steps_per_call {self.per_call} does nothing: evaluations, checkpoints and statistics of "
            f"layers are at most {longest} steps apart; write {longest} or fewer, or have them less often"
        )

    def _halts_around(self, position: int) -> tuple[int, int]:
        """The last halt up to `position`, and the first after it."""
        intervals = [n for n in (self.evaluate, self.save) if n > 0]
        before = [position // n * n for n in intervals]
        after = [position // n * n + n for n in intervals]
        if self.layers > 0:  # the state before a step whose layers are looked at
            number = (position + 1) // self.layers * self.layers
            before.append(number - 1)
            after.append(number + self.layers - 1)
        return max([0, *before]), min([self.steps, *after])
