"""Types of settings with a parser for their text on the command line."""

from collections.abc import Callable
from typing import Annotated, Any

import tyro

from mpjax.config.choices import AUTO, parse_model_name, parse_optimizer_name, parse_or_auto, parse_schedule_name
from mpjax.config.durations import Duration, as_duration, parse_duration
from mpjax.config.several_words import is_a


def _parsed(kind: type, metavar: str, parse: Callable[[str], Any]) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: is_a(kind, value),
        str_from_instance=lambda value: [str(value)],
    )


OrAuto = Annotated[int, _parsed(int, "INT|auto", parse_or_auto)]
"""A number of at least 1 on the command line, or `auto`, which is `AUTO`."""

Steps = Annotated[Duration, _parsed(Duration, "DURATION", parse_duration)]
"""A `Duration` on the command line: `500`, `1e6 examples`, `30 epochs`."""

ModelName = Annotated[str, _parsed(str, "MODEL", parse_model_name)]
"""The name of a model on the command line."""

OptimizerName = Annotated[str, _parsed(str, "OPTIMIZER", parse_optimizer_name)]
"""The name of an update rule on the command line."""

ScheduleName = Annotated[str, _parsed(str, "SCHEDULE", parse_schedule_name)]
"""The name of a learning-rate schedule on the command line."""


def settle_auto(section: Any, *names: str) -> None:
    """Converts the text `auto`, which Python code may set, to `AUTO`."""
    for name in names:
        if getattr(section, name) == "auto":
            object.__setattr__(section, name, AUTO)


def settle_durations(section: Any, *names: str) -> None:
    """Converts fields that Python code sets to a number of steps or to text to `Duration`."""
    for name in names:
        object.__setattr__(section, name, as_duration(getattr(section, name)))


def epochs(amount: float) -> Duration:
    """Creates a `Duration` in epochs."""
    return Duration(amount, "epochs")
