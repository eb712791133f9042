"""From timings to rules."""

import pytest

from mpjax.precision.dtypes import as_dtype
from mpjax.precision.policy_report import PolicyReport, PolicyRow
from mpjax.training.tuning.timing import Timed, Timing, rules_of


SLOW, FAST = Timing((2.0,) * 4, (1.0,) * 4), Timing((1.0,) * 4, (1.0,) * 4)


def report(*paths, **ruled):
    half, full = as_dtype("float16"), as_dtype("float32")
    rows = [PolicyRow(path, "Conv", full, half, "policy") for path in paths]
    return PolicyReport([*rows, *(PolicyRow(path, "Conv", full, full, rule) for path, rule in ruled.items())])


def rules(slow, fast=(), norms=()):
    timed = [Timed("Conv", tuple(slow), SLOW), Timed("Conv", tuple(fast), FAST)]
    return rules_of(timed, report(*slow, *fast, **dict.fromkeys(norms, "type:norm")))


def test_what_is_slower_in_half_precision_is_kept_in_float32_and_nothing_else():
    assert rules(["stem"], ["head"]) == {"stem": "float32"}
    assert rules([], ["stem", "head"]) == {}


def test_one_pattern_says_all_modules_of_a_name():
    slow = ["blocks/0/conv1/depthwise", "blocks/1/conv2/depthwise", "conv1/depthwise"]
    fast = ["blocks/0/conv1/pointwise", "stem/conv1"]
    assert rules(slow, fast) == {"*/depthwise": "float32"}


def test_a_name_that_others_have_too_is_not_used():
    assert rules(["blocks/0/conv1", "blocks/1/conv2"], ["blocks/1/conv1"]) == {
        "blocks/0/conv1": "float32",
        "*/conv2": "float32",
    }
    assert rules(["a/0", "b/1"], ["c"]) == {"a/0": "float32", "b/1": "float32"}


def test_a_pattern_covers_no_module_that_holds_others():
    """`*/block` would be for all in it."""
    assert rules(["x/block"], ["y/block/conv"]) == {"x/block": "float32"}


def test_norms_are_in_float32_anyway():
    assert rules(["a/attention"], ["head"], norms=["b/attention/norm"]) == {"*/attention": "float32"}


def test_names_that_look_like_patterns_are_quoted():
    assert rules(["list[0]"], ["list0"]) == {"list[[]0]": "float32"}


@pytest.mark.parametrize(("ratio", "slower"), [(1.05, False), (1.2, True)])
def test_a_tenth_slower_is_slower(ratio, slower):
    assert Timed("Conv", ("a",), Timing((ratio,) * 4, (1.0,) * 4)).slower_in_half == slower
