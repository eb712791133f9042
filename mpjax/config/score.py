"""The metric of the test set that chooses the best checkpoint and stops training early."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpjax.config.choices import BEST
from mpjax.config.schema import Config
from mpjax.config.tasks import TASKS
from mpjax.errors import UsageError


class Score(NamedTuple):
    """The metric of the test set that chooses the best checkpoint.

    Attributes:
      metric: its name, without `test/`.
      best: the function that chooses the best of several values, min or max.
    """

    metric: str
    best: Callable[[Sequence[float]], float]

    def higher_is_better(self, value: float | None) -> float | None:
        """Negates a value of the metric if lower is better, so that higher is better; None stays None."""
        return -value if value is not None and self.best is min else value

    def improves(self, value: float, before: float, delta: float = 0.0) -> bool:
        """True if a value is better than an earlier one by more than `delta`; never for NaN."""
        return value < before - delta if self.best is min else value > before + delta


ACCURACY = Score("accuracy", max)


def score_of(config: Config) -> Score:
    """Chooses the metric of the best checkpoint: `loop.best`, else the task's, or the loss of the user's own objective.

    Whether higher or lower is better is `loop.best_is`, or known for mpjax's metrics.

    >>> score_of(Config(task="language_modeling"))
    Score(metric='perplexity', best=<built-in function min>)

    Raises:
      UsageError: `loop.best_is` is `auto` and the metric is not mpjax's.
    """
    metric = config.loop.best or ("loss" if config.training.objective else TASKS[config.task].score)
    if config.loop.best_is != "auto":
        return Score(metric, min if config.loop.best_is == "min" else max)
    if metric not in BEST:
        raise UsageError(
            f"--loop.best {metric}: is the smallest or the largest value the best? Write --loop.best_is min or max"
        )
    return Score(metric, BEST[metric])
