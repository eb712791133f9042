"""When something is due: every so many steps, and at the end."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class When:
    """Intervals in attempted steps; 0: only at the end, and for layers never.

    Attributes:
      steps: length of training.
      log: between lines of metrics.
      evaluate: between evaluations.
      save: between checkpoints.
      layers: between statistics of the layers.
    """

    steps: int
    log: int
    evaluate: int
    save: int
    layers: int = 0

    def due(self, interval: int, position: int) -> bool:
        """Whether something with this interval happens after step number `position` (the first is 1)."""
        return position == self.steps or (interval > 0 and position % interval == 0)

    def layers_due(self, position: int) -> bool:
        """Whether step number `position` is one whose layers are looked at."""
        return self.layers > 0 and position % self.layers == 0
