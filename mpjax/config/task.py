"""The tasks: which fields an example has, and which metric says how good a model is at them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple


TaskName = Literal["classification", "segmentation", "text_classification", "language_modeling"]


class TaskKind(NamedTuple):
    """What sets one task apart.

    Attributes:
      fields: names of the fields of an example.
      score: the metric by which the best checkpoint is chosen.
    """

    fields: tuple[str, ...]
    score: str


TASKS: Mapping[TaskName, TaskKind] = {
    "classification": TaskKind(("image", "label"), "accuracy"),
    "segmentation": TaskKind(("image", "mask"), "iou"),
    "text_classification": TaskKind(("text", "label"), "accuracy"),
    "language_modeling": TaskKind(("text",), "perplexity"),
}

BEST: Mapping[str, Callable[[Sequence[float]], float]] = {
    "loss": min,
    "perplexity": min,
    "accuracy": max,
    "top5": max,
    "iou": max,
}
"""Of several values of a metric, the best."""
