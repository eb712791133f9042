"""How metrics read as text: numbers, times, and the fields of a line."""

import math
from collections.abc import Callable, Mapping


def number(value: float) -> str:
    """A loss or an accuracy: four decimals where those say something, else four digits."""
    magnitude = abs(value)
    plain = value == 0 or 1e-3 <= magnitude < 1e5 or not math.isfinite(value)
    return f"{value:.4f}" if plain else f"{value:.3e}"


def rate(value: float) -> str:
    """Examples per second: whole, or three digits below 100."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def count(value: float) -> str:
    """A whole number or a power of two, as it is."""
    return f"{value:.10g}"


def duration(seconds: float | None) -> str:
    """`0:12`, `1:02:03`, or `-:--` while unknown."""
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


def training_fields(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and text of what a person watches while training; other metrics are for the files."""
    return [(label, text(metrics[name])) for name, (label, text) in _TRAIN.items() if name in metrics]


def evaluation_fields(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and text of every evaluated metric: `test/loss` is `loss`, `ema/loss` is `ema_loss`."""
    return [
        (name.removeprefix("test/").replace("/", "_"), number(value))
        for name, value in metrics.items()
        if name.startswith(("test/", "ema/"))
    ]
