"""ConvNeXt as published: sizes, the order in a block, layer scale, stochastic depth."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import ConvNeXt, ConvNeXtBlock, LayerScale, convnext_t
from mpjax.precision import apply_policy


def abstract(make=convnext_t, **settings):
    settings = {"channels": 3, "num_classes": 1000, **settings}
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), **settings))


def test_parameter_count_at_1000_classes():
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract(), nnx.Param))) == 28_589_128


@pytest.mark.parametrize(
    ("patch", "side", "sides"), [(4, 224, [56, 28, 14, 7]), pytest.param(1, 32, [32, 16, 8, 4], marks=pytest.mark.slow)]
)
def test_every_stage_after_the_first_halves_the_image_and_doubles_the_channels(patch, side, sides):
    def shapes(model, x):
        found = [x := model.stem(x)]
        for layer in model.layers:
            found.append(x := layer(x))
        return found

    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    found = [out.shape[1:] for out in nnx.eval_shape(shapes, abstract(patch=patch), images)]
    stages = [(side, side, 96 * 2**stage) for stage, side in enumerate(sides)]
    assert found == [*4 * stages[:1], *4 * stages[1:2], *10 * stages[2:3], *4 * stages[3:]]


@pytest.mark.slow
def test_images_of_which_no_pixel_would_be_left_are_refused():
    def call(model, x):
        return model(x)

    images = jax.ShapeDtypeStruct((2, 40, 31, 3), jnp.float32)
    with pytest.raises(UsageError, match=r"needs images of 32x32 pixels or more, got 40x31; .*patch=1"):
        nnx.eval_shape(call, abstract(), images)
    assert nnx.eval_shape(call, abstract(patch=2, width=4), images).shape == (2, 1000)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


@pytest.mark.slow
def test_a_block_is_its_input_plus_a_scaled_perceptron_of_the_normalised_convolution():
    block = ConvNeXtBlock(4, 0.0, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 7, 7, 4))
    y = layer_norm(np.einsum("hwc,hwc->c", x[0], block.depthwise.kernel[:, :, 0]))
    y = y @ np.asarray(block.expand.kernel[...])
    y = y * np.array([(1 + math.erf(value / 2**0.5)) / 2 for value in y])
    y = y @ np.asarray(block.project.kernel[...])
    block.scale.scale[...] = jnp.array([1.0, -2.0, 3.0, 0.0])
    found = block(x)[0, 3, 3] - x[0, 3, 3]
    np.testing.assert_allclose(found, y * np.array([1.0, -2.0, 3.0, 0.0]), rtol=1e-4, atol=1e-6)


def test_blocks_start_as_a_millionth_of_themselves():
    block = ConvNeXtBlock(4, 0.0, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(block.scale.scale[...], np.full(4, 1e-6, np.float32))


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_the_gradient_of_layer_scale_adds_up_in_float32(policy):
    """Of 4096 ones in float16, added one by one, half would get lost: 2048 + 1 is 2048."""
    layer = LayerScale(2)
    apply_policy(layer, policy)
    graph, params = nnx.split(layer)
    x = jnp.ones((1, 64, 64, 2), jnp.float16)
    text = str(jax.make_jaxpr(jax.grad(lambda params: nnx.merge(graph, params)(x).astype(jnp.float32).sum()))(params))
    assert "f32[2] = reduce_sum" in text
    assert "f16[2] = reduce_sum" not in text


def test_stochastic_depth_grows_from_never_to_its_rate_and_drops_whole_blocks_of_single_examples():
    model = abstract(functools.partial(ConvNeXt, (1, 2)), drop=0.4)
    blocks = [layer for layer in model.layers if isinstance(layer, ConvNeXtBlock)]
    assert [getattr(block.drop, "rate", 0.0) for block in blocks] == [0.0, 0.2, 0.4]

    block = ConvNeXtBlock(2, 0.5, rngs=nnx.Rngs(0))
    block.scale.scale[...] = jnp.ones(2)
    x = jax.random.normal(jax.random.key(1), (32, 3, 3, 2))
    moved = np.asarray(block(x) - x)
    block.eval()
    whole = np.asarray(block(x) - x)
    dropped = np.all(moved == 0, axis=(1, 2, 3))
    assert 4 < dropped.sum() < 28
    np.testing.assert_allclose(moved[~dropped], 2 * whole[~dropped], rtol=1e-3, atol=1e-6)


def test_without_stochastic_depth_there_are_no_random_streams():
    assert jax.tree.leaves(nnx.state(abstract(), nnx.RngState)) == []
