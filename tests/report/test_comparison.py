"""Where curves part: bands, tolerance, smoothing, what is not finite."""

import math

import pytest

from mpjax.errors import UsageError
from mpjax.report import Group, compare_groups


def group(*curves, metric="test/accuracy", name="g", every=10):
    records = [[{"step": every * i, metric: v} for i, v in enumerate(curve, start=1)] for curve in curves]
    return Group(name, {f"{name}{i}": run for i, run in enumerate(records)})


def compare(a, b, metric="test/accuracy", **settings):
    return compare_groups(metric, group(*a, metric=metric), group(*b, metric=metric, name="h"), **settings)


def test_groups_part_at_the_first_step_from_which_their_bands_stay_apart():
    """A spans 0.4 to 0.6 throughout; B overlaps at step 30 for the last time."""
    found = compare([[0.4] * 5, [0.6] * 5], [[0.7, 0.5, 0.5, 0.7, 0.8], [0.8, 0.7, 0.7, 0.9, 0.9]])
    assert (found.parts_at, found.apart) == (40, 2)
    assert list(found.reference.center) == pytest.approx([0.5] * 5)
    assert list(found.reference.half) == pytest.approx([0.1] * 5)


def test_curves_that_meet_again_at_the_end_do_not_part():
    found = compare([[0.4] * 3, [0.6] * 3], [[0.9, 0.9, 0.5], [0.9, 0.9, 0.5]])
    assert (found.parts_at, found.apart) == (None, 0)


def test_curves_may_part_from_the_first_step():
    assert compare([[0.1] * 2, [0.2] * 2], [[0.8] * 2, [0.9] * 2]).parts_at == 10


def test_bands_that_touch_are_not_apart():
    assert compare([[0.0], [1.0]], [[1.0], [2.0]]).parts_at is None


def test_the_difference_is_measured_in_the_spread_of_both_groups():
    """Centers 0.5 and 0.9, halves 0.1 and 0.1: the difference 0.4 is two bands."""
    final = compare([[0.4], [0.6]], [[0.8], [1.0]]).final
    assert (final.difference, final.bands) == (pytest.approx(0.4), pytest.approx(2.0))
    assert final.other.half == pytest.approx(0.1)


def test_the_band_may_be_two_standard_deviations_about_the_mean():
    """Of 1, 2, 6: mean 3, sample variance 7."""
    final = compare([[1.0], [2.0], [6.0]], [[3.0], [3.0], [3.0]], band="std").final
    assert final.reference.center == pytest.approx(3.0)
    assert final.reference.half == pytest.approx(2 * math.sqrt(7))
    assert final.bands == 0.0


@pytest.mark.parametrize("band", ["range", "std"])
def test_mean_and_standard_deviation_are_those_of_the_runs_whatever_the_band(band):
    """Of 1, 2, 6: mean 3, sample variance 7; the middle of the range is 3.5."""
    final = compare([[1.0], [2.0], [6.0]], [[8.0]], band=band).final
    assert final.seeds[0] == (pytest.approx(3.0), pytest.approx(math.sqrt(7)))
    assert final.seeds[1] == (8.0, None)
    assert final.difference == pytest.approx(5.0)


def test_one_seed_against_many_is_held_against_their_band_only():
    found = compare([[0.4] * 2, [0.6] * 2], [[0.59, 0.61]], tolerance=0.9)
    assert found.parts_at == 20


@pytest.mark.parametrize(("tolerance", "parts_at"), [(0.05, 20), (0.15, 30), (0.5, None)])
def test_single_runs_part_where_they_differ_by_more_than_the_tolerance(tolerance, parts_at):
    """By 1 %, 10 % and 20 % of the larger."""
    assert compare([[1.0, 1.0, 1.0]], [[0.99, 0.9, 0.8]], tolerance=tolerance).parts_at == parts_at


def test_equal_curves_do_not_part_whatever_the_tolerance():
    found = compare([[0.5, 0.0]], [[0.5, 0.0]], tolerance=0.0)
    assert (found.parts_at, found.final.bands) == (None, 0.0)


def test_a_difference_without_any_spread_is_infinitely_many_bands():
    found = compare([[1.0], [1.0]], [[2.0], [2.0]])
    assert (found.final.bands, found.parts_at) == (math.inf, 10)


def test_training_curves_are_smoothed_backwards_and_others_are_not():
    curve = [1.0, 3.0, 5.0, 7.0]
    smooth = compare([curve], [curve], "train/loss", smoothing=2)
    assert list(smooth.reference.center) == [1.0, 2.0, 4.0, 6.0]
    assert smooth.final.reference.center == 7.0
    for metric in ("test/loss", "train/loss_scale"):
        assert list(compare([curve], [curve], metric, smoothing=2).reference.center) == curve


def test_noise_does_not_hide_a_parting_that_smoothing_shows():
    noisy = [1.0, 1.2] * 5
    off = [value + 0.3 - 0.3 * (i in (5,)) for i, value in enumerate(noisy)]
    assert compare([noisy], [off], "train/loss").parts_at == 70
    assert compare([noisy], [off], "train/loss", smoothing=4).parts_at == 10


def test_a_group_with_a_run_that_is_not_finite_is_apart_from_one_that_is():
    found = compare([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [[1.0, math.nan, math.inf], [2.0, 1.5, 1.5]])
    assert (found.parts_at, found.final.bands) == (20, math.inf)
    assert math.isnan(found.final.other.center)


def test_an_infinite_value_is_shown_as_one():
    final = compare([[1.0]], [[math.inf]], "train/loss").final
    assert (final.seeds[1].mean, final.difference, final.bands) == (math.inf, math.inf, math.inf)
    assert math.isnan(compare([[math.inf]], [[math.inf]], "train/loss").final.difference)


def test_groups_that_are_both_not_finite_are_not_apart():
    found = compare([[1.0, math.nan]], [[5.0, math.nan]])
    assert (found.parts_at, found.final.bands) == (None, 0.0)


def test_only_steps_that_all_runs_have_are_compared():
    a = group([0.1, 0.2, 0.3, 0.4], every=10)
    b = group([0.2, 0.4], every=20, name="h")
    found = compare_groups("test/accuracy", a, b)
    assert found.steps == [20, 40]
    assert found.parts_at is None


def test_the_best_is_the_highest_accuracy_and_the_lowest_loss_of_each_run():
    accuracy = compare([[0.9, 0.5], [0.5, 0.7]], [[0.6, 0.6], [0.6, math.nan]]).best
    assert (accuracy.reference.center, accuracy.reference.half) == (pytest.approx(0.8), pytest.approx(0.1))
    assert accuracy.other.center == 0.6
    assert compare([[2.0, 3.0]], [[1.0, math.inf]], "train/loss").best.difference == -1.0
    assert compare([[1.0]], [[1.0]], "train/grad_norm").best is None


def test_the_best_is_of_the_steps_that_all_runs_have():
    """The longer run is no better where both have trained."""
    found = compare([[2.0, 1.5]], [[2.0, 1.5, 1.0, 0.5]], "train/loss")
    assert (found.steps, found.best.difference) == ([10, 20], 0.0)


def test_a_run_without_the_metric_is_refused_by_name():
    says = "^h0 has no train/loss in its metrics.jsonl: it has test/loss$"
    with pytest.raises(UsageError, match=says):
        compare_groups("train/loss", group([1.0], metric="train/loss"), group([1.0], metric="test/loss", name="h"))
    with pytest.raises(UsageError, match="it has no metrics yet"):
        compare_groups("train/loss", Group("g", {"a": []}), group([1.0], metric="train/loss"))


def test_runs_without_a_common_step_are_refused():
    with pytest.raises(UsageError, match="all of g0, h0 have test/accuracy: .* same loop.eval_every$"):
        compare_groups("test/accuracy", group([0.1], every=3), group([0.1], every=5, name="h"))


@pytest.mark.parametrize(
    ("ours", "theirs", "by_design", "parts_at"),
    [
        ([1, 1, 1], [8, 8, 4], True, None),
        ([8, 8, 4], [1, 1, 1], True, None),
        ([8, 8, 8], [8, 8, 4], False, 3),
        ([1, 1, 1], [1, 1, 1], False, None),
    ],
)
def test_loss_scales_of_policies_that_need_one_and_that_do_not_differ_by_design(ours, theirs, by_design, parts_at):
    found = compare_groups("train/loss_scale", *(Group("", {"a": scales(values)}) for values in (ours, theirs)))
    assert (found.by_design, found.parts_at) == (by_design, parts_at)


def scales(values):
    return [{"step": step, "train/loss_scale": float(value)} for step, value in enumerate(values, start=1)]
