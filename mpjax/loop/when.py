"""When something is due: every so many steps, and at the end."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class When:
    """Intervals in attempted steps; 0: only at the end.

    Attributes:
      steps: length of training.
      log: between lines of metrics.
      evaluate: between evaluations.
      save: between checkpoints.
    """

    steps: int
    log: int
    evaluate: int
    save: int

    def due(self, interval: int, position: int) -> bool:
        """Whether something with this interval happens after step number `position` (the first is 1)."""
        return position == self.steps or (interval > 0 and position % interval == 0)
