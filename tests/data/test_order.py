"""The order of examples: exact shares of a mixture, whole epochs of each set, a pure function of seed and position."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mpjax.data import Mixed, Portion, Shuffled, counts_of, epoch_size, order_of
from mpjax.data.sources import synthetic_source


MIXED = Mixed(sizes=[1400, 7, 300], counts=[700, 50, 250], batch_size=64, seed=3)


def examples(order, count):
    """Numbers and epochs of the first `count` examples."""
    positions = range(-(-count // order.batch_size))
    return (np.concatenate([take(p) for p in positions])[:count] for take in (order.example_numbers, order.epochs))


@pytest.mark.parametrize(
    ("shares", "counts"),
    [
        ([0.3], [700, 300]),
        ([1 / 3, 1 / 3], [334, 333, 333]),  # of equal remainders, the first set's is served first
        ([0.1, 0.2], [700, 100, 200]),  # 1 - 0.1 - 0.2 is less than 0.7 in floating point
        ([0.0016], [998, 2]),
        ([0.001, 0.998], [1, 1, 998]),
        ([0.2004, 0.3003, 0.1002], [399, 201, 300, 100]),
    ],
)
def test_counts_in_a_block_are_shares_rounded_by_largest_remainders(shares, counts):
    assert counts_of(shares) == counts
    assert sum(counts) == 1000


def test_each_block_has_exactly_the_counts_at_random_places():
    rows, _ = examples(MIXED, 5000)
    for block in rows.reshape(5, 1000):
        assert np.histogram(block, [0, 1400, 1407, 1707])[0].tolist() == [700, 50, 250]
    owners = np.searchsorted([1400, 1407], rows, side="right").reshape(5, 1000)
    assert (owners[0] != owners[1]).any()
    assert {2} < set(owners[0, :40].tolist())  # not one set after the other


def test_an_epoch_of_a_mixture_is_one_pass_through_the_first_set():
    assert MIXED.steps_per_epoch == 2000 // 64
    rows, epochs = examples(MIXED, 4000)
    first = rows < 1400
    assert sorted(rows[:2000][first[:2000]].tolist()) == list(range(1400))
    assert epochs[first].tolist() == [0] * 1400 + [1] * 1400


@hypothesis.given(
    sizes=st.lists(st.integers(1, 400), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    batch_size=st.integers(1, 1500),
    seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=15)
def test_the_examples_of_each_set_form_whole_epochs(sizes, weights, batch_size, seed):
    weights = weights[: len(sizes)]
    counts = counts_of([weight / sum(weights) for weight in weights[1:]])
    rows, epochs = examples(Mixed(sizes, counts, batch_size, seed), 3000)
    start = 0
    for size, count in zip(sizes, counts, strict=True):
        here = (start <= rows) & (rows < start + size)
        assert np.count_nonzero(here) == 3 * count
        assert epochs[here].tolist() == [number // size for number in range(3 * count)]
        for epoch in range(3 * count // size):
            assert sorted(rows[here & (epochs == epoch)].tolist()) == list(range(start, start + size))
        start += size


@pytest.mark.parametrize("batch_size", [48, 64, 1000, 2500])
def test_a_batch_is_a_function_of_seed_and_position_alone(batch_size):
    order = dataclasses.replace(MIXED, batch_size=batch_size)
    whole = np.concatenate([order.example_numbers(position) for position in range(12)])
    for position in (11, 3, 0):
        fresh = dataclasses.replace(order)
        np.testing.assert_array_equal(
            fresh.example_numbers(position), whole[position * batch_size : (position + 1) * batch_size]
        )
    assert (order.example_numbers(0) != dataclasses.replace(order, seed=4).example_numbers(0)).any()


def test_passes_of_a_set_differ_and_so_do_those_of_two_sets_of_one_size():
    order = Mixed([500, 500], [500, 500], 1000, 0)
    first, second = (order.example_numbers(position) for position in (0, 1))
    assert (first[first < 500] != second[second < 500]).any()
    assert (first[first < 500] != first[first >= 500] - 500).any()


def test_one_set_alone_is_shuffled_anew_in_each_epoch_and_leaves_out_what_fills_no_batch():
    order = Shuffled(23, 5, seed=0)
    rows, epochs = examples(order, 40)
    assert (order.steps_per_epoch, order.epochs(4).tolist()) == (4, [1] * 5)
    assert epochs.tolist() == [0] * 20 + [1] * 20
    assert len(set(rows[:20].tolist())) == len(set(rows[20:].tolist())) == 20
    assert set(rows[:20].tolist()) != set(rows[20:].tolist())


def test_the_order_of_one_set_is_that_of_earlier_versions():
    assert Shuffled(10, 4, seed=3).example_numbers(1).tolist() == [3, 5, 9, 7]


def test_the_order_of_a_source():
    source = synthetic_source(3, (4, 4, 1), 70)
    assert (epoch_size(source), type(order_of(source, 5, 0))) == (70, Shuffled)
    mixture = dataclasses.replace(source, mix=(Portion(synthetic_source(3, (4, 4, 1), 9), 0.3),))
    order = order_of(mixture, 5, 8)
    assert isinstance(order, Mixed)
    assert (order.sizes, order.counts, order.batch_size, order.seed) == ([70, 9], [700, 300], 5, 8)
    assert (epoch_size(mixture), order.steps_per_epoch) == (100, 20)
