"""Formats metrics as text: numbers, durations, labels, and the titles of figures."""

import math
import pathlib
from collections.abc import Callable, Mapping

from mpjax.config.choices import FILE_KINDS, NPZ
from mpjax.config.schema import Config
from mpjax.config.user_code import Code, names_code
from mpjax.report.history import History, changed_settings, turns_of


def number(value: float) -> str:
    """Formats a loss or an accuracy: four decimals, or four significant digits below 0.001 and from 100,000 on.

    >>> number(0.5), number(0.00012345)
    ('0.5000', '1.234e-04')
    """
    magnitude = abs(value)
    plain = value == 0 or 1e-3 <= magnitude < 1e5 or not math.isfinite(value)
    return f"{value:.4f}" if plain else f"{value:.3e}"


def rate(value: float) -> str:
    """Formats a number of examples per second: an integer, or three significant digits below 100."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def count(value: float) -> str:
    """Formats an integer or a power of two, with up to ten significant digits."""
    return f"{value:.10g}"


def duration(seconds: float | None) -> str:
    """Formats a duration as minutes and seconds, with hours if there are any; `-:--` if it is None or not finite.

    >>> duration(12), duration(3723), duration(None)
    ('0:12', '1:02:03', '-:--')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, whole = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


_TRAIN: dict[str, tuple[str, Callable[[float], str]]] = {
    "train/loss": ("loss", number),
    "train/accuracy": ("accuracy", number),
    "train/iou": ("iou", number),
    "train/examples_per_second": ("examples/s", rate),
    "train/loss_scale": ("loss_scale", count),
    "train/skipped": ("skipped", count),
}


_QUALITY = ("train/loss", "train/accuracy", "train/iou")

_FILES_ONLY = ("train/grad_norm", "train/learning_rate", "train/consecutive_skips")


def training_fields(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Lists the label and the text of each training metric (`train/NAME`) that the console shows, in order.

    Loss, accuracy and iou (`_QUALITY`) are first, then a user's own metrics, which are all that mpjax has no name for,
    then the others of `_TRAIN`. Metrics of `_FILES_ONLY` are left out.
    """
    users = [name for name in metrics if name.startswith("train/") and name not in (*_TRAIN, *_FILES_ONLY)]
    fields = {**{name: (name.removeprefix("train/"), number) for name in users}, **_TRAIN}
    shown = [name for name in dict.fromkeys((*_QUALITY, *users, *_TRAIN)) if name in metrics]
    return [(label, text(metrics[name])) for name in shown for label, text in [fields[name]]]


def evaluation_fields(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The label and text of each `test/` and `ema/` metric: `test/loss` becomes `loss`, `ema/loss` `ema_loss`."""
    return [
        (name.removeprefix("test/").replace("/", "_"), number(value))
        for name, value in metrics.items()
        if name.startswith(("test/", "ema/"))
    ]


def title_of(config: Config, history: History = ()) -> str:
    """Formats the title of a run's figures: model, data, policies, and the number of precision rules if there are any.

    If the rules changed during the run, it says up to which step there were others.

    >>> title_of(Config())
    'resnet18 on digits, mixed_float16'
    >>> title_of(Config(), [{"step": 9, "changed": {"precision.policy": ["float32", "mixed_float16"]}}])
    'resnet18 on digits, float32 to step 9, then mixed_float16'

    Args:
      config: the settings of the run's last steps.
      history: the history of the run, if its settings may have changed.
    """
    rules = len(config.precision.rules)
    more = f" with {rules} rule{'s' if rules > 1 else ''}" if rules else ""
    changed = changed_settings(history)
    if changed_steps := [step for step, text in turns_of(history).items() if "precision.rules." in text]:
        more += f" (other rules to step {changed_steps[-1]:,})"
    return f"{subject_of(config)}, {changed.get('precision.policy', config.precision.policy)}{more}"


def subject_of(config: Config) -> str:
    """Names the model and the data of a run, without their folders."""
    return f"{short_name(config.model.name)} on {short_name(config.data.name)}"


def short_name(spec: Code) -> str:
    """Shortens the name of a model or of data to the name of its class, function or folder; others are unchanged.

    >>> short_name("models/mine.py:Net"), short_name("folder:/data/flowers"), short_name("resnet18")
    ('Net', 'flowers', 'resnet18')
    """
    spec = str(spec)
    kind, _, where = spec.partition(":")
    if kind in FILE_KINDS or spec.lower().endswith(NPZ):
        return pathlib.PurePath(where or spec).name or spec
    return spec.rpartition(":")[2].rpartition(".")[2] if names_code(spec) else spec
