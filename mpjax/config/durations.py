"""Durations in steps, examples or epochs, and their conversion to steps."""

import dataclasses
import math
import re
from typing import Any, Literal

from mpjax.errors import UsageError


Unit = Literal["steps", "examples", "epochs"]

_UNITS: dict[str, Unit] = {
    "steps": "steps",
    "step": "steps",
    "": "steps",
    "examples": "examples",
    "example": "examples",
    "epochs": "epochs",
    "epoch": "epochs",
}


_MOST_STEPS = 2**31 - 1  # steps are counted in int32


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of training: `500` or `500 steps`, `1e6 examples`, `30 epochs`.

    Attributes:
      amount: the number of units.
      unit: "steps", "examples" or "epochs".
    """

    amount: float
    unit: Unit = "steps"

    def __str__(self) -> str:
        short = f"{self.amount:.15g}"
        amount = short if float(short) == self.amount else repr(self.amount)  # the text must parse to the same number
        return amount if self.unit == "steps" else f"{amount} {self.unit}"

    def in_steps(self, batch_size: int, steps_per_epoch: int) -> int:
        """Converts the duration to steps, rounded to the nearest; a duration above 0 is at least 1 step.

        >>> Duration(2, "epochs").in_steps(batch_size=64, steps_per_epoch=22)
        44

        Args:
          batch_size: examples per step.
          steps_per_epoch: steps per pass over the training set.

        Raises:
          UsageError: the duration has more steps than int32 can count.
        """
        per_unit = {"steps": 1.0, "examples": 1.0 / batch_size, "epochs": float(steps_per_epoch)}
        steps = self.amount * per_unit[self.unit]
        if steps > _MOST_STEPS:
            raise UsageError(f"a duration of {self} is {steps:.3g} steps: wanted at most {_MOST_STEPS:,}")
        return max(1, round(steps)) if steps > 0 else 0


def as_duration(value: "Duration | int | str") -> Duration:
    """Converts a number of steps, or text such as `"30 epochs"`, to a `Duration`; a `Duration` is returned unchanged.

    Raises:
      UsageError: as `parse_duration`.
    """
    return value if isinstance(value, Duration) else parse_duration(str(value))


def parse_duration(text: str) -> Duration:
    """Parses text such as `"500"`, `"30 epochs"` or `"1e6examples"`; without a unit, the number counts steps.

    Spaces and capitals do not matter.

    >>> parse_duration("30 epochs")
    Duration(amount=30.0, unit='epochs')

    Raises:
      UsageError: the unit is unknown, the amount is no number, negative or infinite, or the steps are fractional.
    """
    match = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"bad duration '{text}': wanted e.g. '500', '500 steps', '1e6 examples' or '30 epochs'")
    amount, unit = float(match[1]), _UNITS[match[2]]
    if not math.isfinite(amount) or (unit == "steps" and amount != int(amount)):
        raise UsageError(f"bad duration '{text}': wanted a whole number of steps")
    return Duration(amount, unit)


def settle_durations(section: Any, *names: str) -> None:
    """Converts the fields `names` of a frozen dataclass to `Duration`s by `as_duration`, in place.

    Python code may have set them to a number of steps or to text. It is called in `__post_init__`.

    Raises:
      UsageError: as `parse_duration`.
    """
    for name in names:
        object.__setattr__(section, name, as_duration(getattr(section, name)))


def epochs(amount: float) -> Duration:
    """Creates a `Duration` in epochs."""
    return Duration(amount, "epochs")
