"""Looks for the errors that follow a missing setting, so that one error names all flags to write."""

import shlex
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from mpjax.commands.learner import make_task
from mpjax.config.folders import data_folder
from mpjax.config.schema import Config, with_settings
from mpjax.data.batches import require_batch
from mpjax.data.example_reader import batch_fields
from mpjax.data.open import open_source
from mpjax.errors import UsageError
from mpjax.training.precision_plan import plan_precision


_MOST = 8  # messages in one error: repairs that contradict each other would go on without end
_THEN = "then: "


def raise_together(error: UsageError, config: Config) -> NoReturn:
    """Raises an error that also names the errors that would follow once its `repair` is written, and all their flags.

    To find them, it applies the repair to the settings, opens the data and builds the model again. An error without a
    repair, or that no error follows, is raised as it is.
    """
    messages, settings = _followed(error, config)
    if len(messages) == 1:
        raise error
    raise UsageError("\n".join([*messages, *_to_write(settings)]), repair=settings) from error


def _to_write(settings: Mapping[str, Any]) -> Iterator[str]:
    if left_out := [f"--{name}" for name, value in settings.items() if value == ()]:
        yield f"leave out {' and '.join(left_out)}"
    if written := flags(settings):
        yield f"write all of these: {written}"


def _followed(error: UsageError, config: Config) -> tuple[list[str], dict[str, Any]]:
    """Applies the repair of an error to the settings, then that of the next error, and so on, up to `_MOST` errors.

    Returns:
      The messages, and the settings of all repairs. The settings are empty if a message repeats, because then a repair
        has no effect or another repair undoes it.
    """
    messages, settings = [str(error)], dict(error.repair)
    while error.repair and len(messages) < _MOST:
        config = with_settings(config, error.repair)
        try:
            with warnings.catch_warnings(action="ignore"):
                _attempt(config)
            break
        except UsageError as other:
            error = other
            if str(error) in (messages[0], *(text.removeprefix(_THEN) for text in messages[1:])):
                return messages, {}
            messages.append(f"{_THEN}{error}")
            settings.update(error.repair)
    return messages, settings


def _attempt(config: Config) -> None:
    """Opens the data and builds the abstract model for its fields, only to raise the next error of these settings.

    It neither reads all examples nor creates an array.

    Raises:
      UsageError: the settings have an error.
    """
    source = open_source(config.data, data_folder(config), config.task)
    fields = batch_fields(source, config.data)
    require_batch(source, config.data)
    make_task(config, plan_precision(config.precision), fields)


def flags(settings: Mapping[str, Any]) -> str:
    """Formats settings, by name, as flags for a shell. A setting with an empty tuple is left out.

    >>> flags({"data.test_split": "train[90%:]", "data.mask_values": (0, 255)})
    "--data.test_split 'train[90%:]' --data.mask_values 0 255"
    """
    words = []
    for name, value in settings.items():
        if value != ():
            words += [f"--{name}", *map(str, _words(value))]
    return shlex.join(words)


def _words(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(word for pair in value.items() for word in pair)
    return value if isinstance(value, tuple) else (value,)
