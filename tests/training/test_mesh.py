"""The state whole on both devices, the batch cut across them."""

import jax
import jax.numpy as jnp
import pytest

from mpjax.errors import UsageError
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh


def rows_per_device(sharding, size=8):
    return [shard.data.shape[0] for shard in jax.device_put(jnp.zeros((size, 3)), sharding).addressable_shards]


def test_batches_are_divided_and_states_are_not():
    mesh = make_mesh()
    assert mesh.size == 2
    assert rows_per_device(Layout(mesh).batch(size=8)) == [4, 4]
    assert rows_per_device(Layout(mesh).replicated) == [8, 8]


def test_evaluation_batches_are_divided_where_that_is_even():
    assert rows_per_device(Layout(make_mesh()).evaluation(8)) == [4, 4]
    assert rows_per_device(Layout(make_mesh()).evaluation(7), size=7) == [7, 7]


@pytest.mark.parametrize(("size", "accumulate", "instead"), [(63, 1, 62), (64, 5, 60), (1, 1, 2), (3, 4, 8)])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(size, accumulate, instead):
    with pytest.raises(UsageError) as raised:
        Layout(make_mesh()).batch(size=size, accumulate=accumulate)
    assert str(raised.value) == (
        f"a batch of {size} examples does not divide among 2 devices x {accumulate} micro-batches: "
        f"take a multiple of {2 * accumulate}, such as {instead}"
    )
