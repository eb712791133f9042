"""The metric of the test set that chooses the best checkpoint and stops training early."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpjax.config.choices import BEST, TASKS
from mpjax.config.schema import Config
from mpjax.errors import UsageError


class Score(NamedTuple):
    """The metric of the test set that chooses the best checkpoint.

    Attributes:
      metric: its name, without `test/`.
      best: the function that returns the best of several values, min or max.
    """

    metric: str
    best: Callable[[Sequence[float]], float]

    def higher_is_better(self, value: float | None) -> float | None:
        """Returns a value of the metric, negated if lower is better."""
        return -value if value is not None and self.best is min else value

    def improves(self, value: float, before: float, delta: float = 0.0) -> bool:
        """Returns True if a value is better than one before by more than `delta`; NaN never is."""
        return value < before - delta if self.best is min else value > before + delta


ACCURACY = Score("accuracy", max)


def score_of(config: Config) -> Score:
    """Returns the metric that chooses the best checkpoint: by default that of the task; of an own objective, the loss.

    >>> score_of(Config(task="language_modeling"))
    Score(metric='perplexity', best=<built-in function min>)

    Raises:
      UsageError: it is not known which value of the metric is best.
    """
    metric = config.loop.best or ("loss" if config.training.objective else TASKS[config.task].score)
    if config.loop.best_is != "auto":
        return Score(metric, min if config.loop.best_is == "min" else max)
    if metric not in BEST:
        raise UsageError(
            f"--loop.best {metric}: is the smallest or the largest value the best? Write --loop.best_is min or max"
        )
    return Score(metric, BEST[metric])
