"""Which metric chooses the best checkpoint, and which of its values is best."""

import math

import pytest

from mpjax.config import Config, Loop, Score, Training, check, score_of
from mpjax.errors import UsageError


def test_each_task_has_its_own_and_an_own_objective_the_loss():
    assert score_of(Config()) == Score("accuracy", max)
    assert score_of(Config(task="segmentation")) == Score("iou", max)
    assert score_of(Config(training=Training(objective="mine.py:loss"))) == Score("loss", min)


def test_the_user_may_choose_another():
    assert score_of(Config(loop=Loop(best="loss"))) == Score("loss", min)
    assert score_of(Config(loop=Loop(best="dice", best_is="max"))) == Score("dice", max)


def test_which_value_is_best_has_to_be_said_of_an_own_metric():
    config = Config(loop=Loop(best="dice"), training=Training(metrics=("mine.py:dice",)))
    check(config)  # whether there is such a metric is not known before the data is, and comes first
    with pytest.raises(UsageError, match="--loop.best dice: is the smallest or the largest value the best?"):
        score_of(config)


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (
            "acuracy",
            r"there is no such metric; did you mean accuracy\? mpjax has loss, perplexity, accuracy, top5",
        ),
        ("nosuch", "there is no such metric; mpjax has loss"),
        ("test/accuracy", "metrics are named without test/; write --loop.best accuracy$"),
    ],
)
@pytest.mark.parametrize("best_is", ["auto", "max"])
def test_a_name_that_cannot_be_a_metric_is_an_error_whatever_is_best(best, said, best_is):
    with pytest.raises(UsageError, match=f"--loop.best {best}: {said}"):
        check(Config(loop=Loop(best=best, best_is=best_is)))


def test_a_higher_score_is_better():
    assert Score("loss", min).higher_is_better(0.5) == -0.5
    assert Score("iou", max).higher_is_better(0.5) == 0.5
    assert Score("iou", max).higher_is_better(None) is None


@pytest.mark.parametrize(
    ("value", "before", "delta", "better"),
    [(0.5, 0.6, 0.0, True), (0.5, 0.6, 0.2, False), (0.6, 0.6, 0.0, False), (math.nan, 0.6, 0.0, False)],
)
def test_an_improvement_is_more_than_delta(value, before, delta, better):
    assert Score("loss", min).improves(value, before, delta) is better
    assert Score("iou", max).improves(-value, -before, delta) is better
