"""When training cannot go on: values stay non-finite where no smaller loss scale can help."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is tolerated.

    Attributes:
      floor: the smallest loss scale; None without loss scaling, when nothing is skipped and NaN spreads at once.
      patience: steps in a row that may be skipped at the floor.
    """

    floor: float | None
    patience: int

    def exceeded_by(self, metrics: Mapping[str, float]) -> str | None:
        """Why the step with these metrics ends training, or None."""
        if self.floor is None:
            # The gradient too: after its last step a run would end well, with parameters that are NaN.
            bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
            return f"{bad[0]} is {metrics[bad[0]]}" if bad else None
        if metrics["loss_scale"] > self.floor or metrics["consecutive_skips"] < self.patience:
            return None
        skips = int(metrics["consecutive_skips"])
        return f"gradients were not finite {skips} steps in a row, the last at the smallest loss scale {self.floor:g}"
