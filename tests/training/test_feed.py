"""What compiled calls are given, and the batches that are read from it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.config import Data
from mpjax.data import Alternating, BatchesInMemory, Shuffled
from mpjax.data.augment import prepare
from mpjax.precision import no_loss_scaling
from mpjax.training import (
    Layout,
    Resident,
    SelectedRows,
    Single,
    Stacked,
    create_state,
    feed_of,
    make_mesh,
    make_train_call,
    make_train_step,
    take_apart,
)


BATCHES = BatchesInMemory(
    {"image": np.arange(60, dtype=np.uint8).reshape(10, 3, 2), "label": np.arange(10, dtype=np.int32)},
    Shuffled(10, 4, seed=3),
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


@pytest.mark.parametrize("kind", [Single, Stacked, Resident.of])
def test_no_batch_is_read_that_no_call_is_given(kind, sharding):
    drawn = []

    class Counted(BatchesInMemory):
        def rows_from(self, position):
            return map(self.drawn, super().rows_from(position))

        def drawn(self, batch):
            drawn.append(batch)
            return batch

    assert len(list(kind(Counted(BATCHES.arrays, BATCHES.order), sharding).calls(0, [1, 1]))) == 2
    assert len(drawn) == 2


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
    assert isinstance(first, SelectedRows)
    assert first.table["image"] is second.table["image"]
    assert first.numbers.dtype == np.int32


FLIPPING = dataclasses.replace(BATCHES, orientation=Alternating(3))


@pytest.mark.parametrize("kind", [Single, Stacked, Resident.of])
def test_every_feed_says_what_to_flip(kind, sharding):
    counts = [1, 1, 1, 1] if kind is Single else [1, 3]
    given = read(kind(FLIPPING, sharding), 1, counts)
    wanted = list(itertools.islice(FLIPPING.from_position(1), 4))
    for mine, other in zip(given, wanted, strict=True):
        assert mine["mirrored"].dtype == bool
        assert mine["mirrored"].tolist() == other["mirrored"].tolist()
    assert {bool(flip) for batch in given for flip in batch["mirrored"]} == {True, False}


def test_the_shapes_for_another_number_of_steps_tell_of_flips_too(sharding):
    feed = Resident.of(FLIPPING, sharding)
    two, three = (next(feed.calls(0, [count])) for count in (2, 3))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), three)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), feed.abstract(two, 3)) == shapes


class Nothing(nnx.Module):
    """A model of one number."""

    def __init__(self):
        self.number = nnx.Param(jnp.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Single, Stacked, Resident.of])
def test_each_image_is_trained_on_in_both_orientations_by_two_devices_in_two_micro_batches(kind):
    # An image is [0, 2 ** number] or, mirrored, [2 ** number, 0]: a sum of pixels is the set of its images.
    images = np.stack([np.zeros(8), 2.0 ** np.arange(8)], axis=-1).astype(np.float32).reshape(8, 1, 2, 1)
    batches = BatchesInMemory({"image": images}, Shuffled(8, 4, seed=0), orientation=Alternating(0))
    config = Data(flip=True, alternate_flips=True, crop_padding=0)
    layout = Layout(make_mesh())
    assert layout.mesh.size == 2

    def loss_of(model, batch, key):
        mirrored, kept = (jnp.mean(batch["image"][:, 0, side, 0], dtype=jnp.float32) for side in (0, 1))
        return model.number[...], {"mirrored": mirrored, "kept": kept}

    structure, params, stats = take_apart(Nothing())
    tx = no_loss_scaling(optax.sgd(1.0))
    prepared = functools.partial(prepare, config=config, fields={})
    step = make_train_step(structure, tx, loss_of, prepare=prepared, accumulate=2, layout=layout)
    feed = kind(batches, layout.batch(size=4, accumulate=2))
    call = make_train_call(step, feed.batch)
    state, mirrored, kept = create_state(params, stats, tx), [], []
    counts = [1, 1, 1, 1] if kind is Single else [3, 1]
    for count, fed in zip(counts, feed.calls(0, counts), strict=True):
        state, metrics = call(state, fed, count)
        for name, sums in ("mirrored", mirrored), ("kept", kept):
            sums.extend((4 * np.ravel(metrics.array[..., metrics.names.index(name)])).astype(int).tolist())
    first, second = mirrored[0] + mirrored[1], mirrored[2] + mirrored[3]  # epochs have two steps
    assert first == 0b10111011  # seed 0 begins with 11011101
    assert second == 0b01000100
    assert (kept[0] + kept[1], kept[2] + kept[3]) == (second, first)
