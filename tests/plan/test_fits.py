"""The largest batch by the line through two."""

import pytest

from mpjax.plan import Fit, largest_batch, other_batch, verified_batch


@pytest.mark.parametrize(("batch", "step", "other"), [(256, 1, 128), (24, 8, 8), (8, 8, 16), (1, 1, 2), (40, 16, 16)])
def test_the_second_batch_is_about_half_and_a_multiple(batch, step, other):
    assert other_batch(batch, step) == other


def test_memory_grows_along_the_line():
    """1 GB and 10 MB for each example: 89 GB are 8800 examples, and 20 MB are none."""
    points = {size: 1_000_000_000 + 10_000_000 * size for size in (100, 200)}
    assert largest_batch(points, 89_000_000_000, step=1) == Fit(8800, compiled=False)
    assert largest_batch(points, 89_000_000_000, step=64) == Fit(8768, compiled=False)
    assert largest_batch(points, 20_000_000, step=1) == Fit(0, compiled=False)


def test_a_batch_that_was_compiled_is_known_and_not_reckoned():
    assert largest_batch({100: 2_000, 200: 3_000}, 3_009, step=1) == Fit(200, compiled=True)


def test_a_batch_whose_memory_was_scaled_from_another_gpu_s_is_reckoned_until_it_is_compiled():
    points = {100: 2_000, 200: 3_000}
    assert largest_batch(points, 2_009, step=1, scaled={100}) == Fit(100, compiled=False)
    assert largest_batch(points, 3_009, step=1, scaled={100}) == Fit(200, compiled=True)
    assert verified_batch(points, 2_009, lambda size: 2_005, step=1, scaled={100}) == Fit(100, compiled=True)


def test_memory_that_does_not_grow_has_no_line():
    with pytest.raises(ValueError, match="100 examples take 5 bytes, 200 take 5: memory does not grow"):
        largest_batch({100: 5, 200: 5}, 9, step=1)


def test_of_several_batches_those_next_to_the_limit_give_the_line():
    """From 100 to 200 examples memory grows by 10 for each, from 200 to 400 by 20."""
    points = {100: 1_000, 200: 2_000, 400: 6_000}
    assert [largest_batch(points, limit, step=1).batch for limit in (500, 1_500, 4_000, 8_000)] == [50, 150, 300, 500]


def test_a_batch_that_does_not_fit_after_all_mends_the_line():
    """Memory that grows as the square of the batch: the line says 900 examples, and 500 fit."""
    compiled = []

    def square(size: int) -> int:
        compiled.append(size)
        return size * size

    assert verified_batch({100: 10_000, 200: 40_000}, 250_000, square, step=10) == Fit(480, compiled=True)
    assert compiled == [900, 390, 460, 480]


def test_a_batch_that_leaves_much_room_is_not_the_largest():
    """What both small batches take is a workspace for the most part: a line through them is far too steep."""
    compiled = []

    def memory(size: int) -> int:
        compiled.append(size)
        return 1_000 + size

    assert verified_batch({1: 10, 2: 1_002}, 1_000_000, memory, step=1) == Fit(999_000, compiled=True)
    assert compiled == [1009, 999_000]


def test_where_a_larger_batch_takes_less_what_fits_is_kept():
    """XLA computes again what would not fit: from there on there is no line."""
    assert verified_batch({100: 100, 200: 200}, 1_000, lambda size: 150, step=1) == Fit(1000, compiled=True)


def test_where_no_batch_fits_and_smaller_ones_take_more_none_fits():
    """75 examples take more than 100 do."""
    assert verified_batch({100: 5_000, 200: 9_000}, 4_000, lambda size: 5_100, step=1) == Fit(0, compiled=False)


def test_verifying_ends():
    compiled = []

    def a_little_too_much(size: int) -> int:
        compiled.append(size)
        return 101 + size

    assert not verified_batch({1: 1, 2: 2}, 100, a_little_too_much, step=1).compiled
    assert len(compiled) == 5
