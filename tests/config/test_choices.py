"""Names that settings choose from: what is taken as it is, what is refused, and what counts as best."""

import typing

import pytest

from mpjax.config import BEST, TASKS, TaskName, parse_model_name, parse_optimizer_name, parse_schedule_name
from mpjax.errors import UsageError


@pytest.mark.parametrize("name", ["resnet50", "models/mine.py:Net", "package.mine:Net", "hf:folder", "hf:owner/name"])
def test_a_known_model_a_folder_and_one_of_the_users_own_are_taken_as_written(name):
    assert parse_model_name(name) == name


def test_a_folder_without_a_name_is_an_error():
    with pytest.raises(UsageError, match="no model 'hf:': wanted a folder of Hugging Face files, as in hf:FOLDER"):
        parse_model_name("hf:")


@pytest.mark.parametrize(("given", "meant"), [("resnet-50", "resnet50"), ("gpt", "gpt2"), ("vit_b_16", "vit_b16")])
def test_a_misspelled_model_is_answered_with_the_nearest(given, meant):
    with pytest.raises(UsageError, match=f"no model '{given}'; did you mean {meant}\\? wanted mlp, "):
        parse_model_name(given)


@pytest.mark.parametrize("given", ["", "yolov8", "models/mine.py"])
def test_what_is_near_no_model_gets_no_guess_but_the_ways_to_name_one(given):
    with pytest.raises(UsageError, match="or FILE.py:NAME or package.module:NAME for your own") as raised:
        parse_model_name(given)
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize("name", ["sgd", "lion", "schedule_free_adamw", "rules/mine.py:rule", "muon"])
def test_any_name_may_be_one_of_optax(name):
    assert parse_optimizer_name(name) == name


@pytest.mark.parametrize("name", ["", "mine.py", "adam-w"])
def test_what_can_be_no_name_of_optax_is_an_error(name):
    with pytest.raises(UsageError, match=f"no optimizer '{name}'; wanted sgd, adamw, lamb, a name of optax"):
        parse_optimizer_name(name)


def test_a_schedule_is_a_known_one_or_the_users_own():
    assert [parse_schedule_name(name) for name in ("one_cycle", "mine.py:rate")] == ["one_cycle", "mine.py:rate"]
    with pytest.raises(UsageError, match=r"no schedule 'cosin'; did you mean cosine\? wanted cosine, linear, constant"):
        parse_schedule_name("cosin")


@pytest.mark.parametrize(
    ("metric", "best"), [("loss", 0.5), ("perplexity", 0.5), ("accuracy", 2.0), ("top5", 2.0), ("iou", 2.0)]
)
def test_errors_are_best_when_low_and_hits_when_high(metric, best):
    assert BEST[metric]([1.0, 0.5, 2.0]) == best


def test_every_task_has_a_score_that_can_be_best():
    assert set(TASKS) == set(typing.get_args(TaskName))
    assert {kind.score for kind in TASKS.values()} <= set(BEST)
