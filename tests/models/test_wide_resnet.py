"""Wide ResNet as published: sizes, strides, the order in a block, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import wide_resnet


def abstract(make, **settings):
    settings = {"channels": 3, "num_classes": 10, **settings}
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), **settings))


@pytest.mark.parametrize(("name", "parameters"), [("wrn28_10", 36_479_194), ("wrn16_4", 2_748_890)])
def test_parameter_count_at_10_classes(name, parameters):
    model = abstract(getattr(wide_resnet, name))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


def test_wrn_28_10_has_three_stages_of_four_blocks_the_later_two_at_half_the_side():
    def shapes(model, x):
        found = [x := model.stem(x)]
        for block in model.blocks:
            found.append(x := block(x))
        return found

    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    found = [out.shape[1:] for out in nnx.eval_shape(shapes, abstract(wide_resnet.wrn28_10), images)]
    assert found == [(32, 32, 16), *4 * [(32, 32, 160)], *4 * [(16, 16, 320)], *4 * [(8, 8, 640)]]


@pytest.mark.parametrize("depth", [9, 4, 18])
def test_a_depth_that_three_equal_stages_cannot_have_is_refused(depth):
    with pytest.raises(UsageError, match=rf"depth must be 6n \+ 4 .*, got {depth}"):
        abstract(functools.partial(wide_resnet.WideResNet, depth, 1))


def norm(x, eps=1e-5):
    """What a batch norm in training mode does, its scale 1 and its bias 0."""
    return (x - x.mean(axis=(0, 1, 2))) / np.sqrt(x.var(axis=(0, 1, 2)) + eps)


def test_a_block_is_norm_relu_convolution_twice_around_its_input():
    block = wide_resnet.WideBlock(2, 2, 1, 0.0, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 4, 2))
    y = block.conv1(jnp.maximum(norm(np.asarray(x)), 0))
    y = block.conv2(jnp.maximum(norm(np.asarray(y)), 0))
    np.testing.assert_allclose(block(x), x + y, rtol=1e-5, atol=1e-5)


def test_a_block_that_changes_the_shape_convolves_what_its_first_relu_gives():
    block = wide_resnet.ChangingBlock(2, 3, 2, 0.0, rngs=nnx.Rngs(0))
    block.conv2.kernel[...] = jnp.zeros((3, 3, 3, 3))
    x = jax.random.normal(jax.random.key(1), (2, 4, 4, 2))
    expected = np.maximum(norm(np.asarray(x)), 0)[:, ::2, ::2] @ np.asarray(block.shortcut.kernel[0, 0])
    np.testing.assert_allclose(block(x), expected, rtol=1e-5, atol=1e-5)


def test_dropout_is_off_by_default_and_in_evaluation():
    x = jax.random.normal(jax.random.key(1), (2, 4, 4, 2))
    assert nnx.state(wide_resnet.WideBlock(2, 2, 1, 0.0, rngs=nnx.Rngs(0)), nnx.RngState) == nnx.State({})
    block = wide_resnet.WideBlock(2, 2, 1, 0.5, rngs=nnx.Rngs(0))
    assert not np.array_equal(block(x), block(x))
    block.eval()
    np.testing.assert_array_equal(block(x), block(x))
