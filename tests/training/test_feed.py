"""What compiled calls are given, and the batches that are read from it."""

import itertools

import jax
import numpy as np
import pytest

from mpjax.data.stream import BatchesInMemory
from mpjax.training.feed import Resident, Rows, Single, Stacked, feed_of
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh


BATCHES = BatchesInMemory(
    {"image": np.arange(60, dtype=np.uint8).reshape(10, 3, 2), "label": np.arange(10, dtype=np.int32)}, 4, seed=3
)


class Streamed:
    """The same batches, not from arrays."""

    batch_size, steps_per_epoch = 4, 2

    def from_position(self, position):
        return BATCHES.from_position(position)


@pytest.fixture
def sharding():
    return Layout(make_mesh()).batch(size=4)


def read(feed, position, counts):
    """The batches of all steps, as a compiled call reads them."""
    found = []
    for count, fed in zip(counts, feed.calls(position, counts), strict=True):
        found += [jax.device_get(jax.jit(feed.batch)(fed, index)) for index in range(count)]
    return found


@pytest.mark.parametrize("kind", [Single, Stacked, Resident.of])
@pytest.mark.parametrize("position", [0, 3])
def test_every_feed_gives_the_same_batches(kind, position, sharding):
    counts = [1, 1, 1, 1] if kind is Single else [1, 3]
    given = read(kind(BATCHES, sharding), position, counts)
    wanted = list(itertools.islice(BATCHES.from_position(position), 4))
    assert len(given) == 4
    for mine, other in zip(given, wanted, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], other[name])
            assert mine[name].dtype == other[name].dtype


@pytest.mark.parametrize(
    ("batches", "most_steps", "device_bytes", "kind"),
    [
        (BATCHES, 1, 10**6, Single),
        (BATCHES, 8, 100, Resident),  # 60 bytes of images and 40 of labels
        (BATCHES, 8, 99, Stacked),
        (Streamed(), 8, 10**6, Stacked),
        (Streamed(), 1, 10**6, Single),
    ],
)
def test_a_set_is_put_on_the_device_where_it_fits(batches, most_steps, device_bytes, kind, sharding):
    assert isinstance(feed_of(batches, sharding, most_steps=most_steps, device_bytes=device_bytes), kind)


@pytest.mark.parametrize("kind", [Single, Stacked, Resident.of])
def test_batches_are_divided_among_the_devices(kind, sharding):
    feed = kind(BATCHES, sharding)
    (fed,) = feed.calls(0, [1])
    batch = jax.jit(feed.batch)(fed, 0)
    assert {shard.data.shape for shard in batch["image"].addressable_shards} == {(2, 3, 2)}


@pytest.mark.parametrize("kind", [Stacked, Resident.of])
def test_the_shapes_for_another_number_of_steps(kind, sharding):
    feed = kind(BATCHES, sharding)
    two, three = (next(feed.calls(0, [count])) for count in (2, 3))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), three)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), feed.abstract(two, 3)) == shapes


def test_a_resident_set_is_sent_once(sharding):
    feed = Resident.of(BATCHES, sharding)
    first, second = feed.calls(0, [2, 2])
    assert isinstance(first, Rows)
    assert first.table["image"] is second.table["image"]
    assert first.numbers.dtype == np.int32
