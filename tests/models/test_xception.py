"""Xception as published: sizes, strides, where the ReLUs are, convolutions in half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import HalvingBlock, MiddleBlock, SeparableConv, SmallXceptionStem, XceptionStem, identity, xception8


def abstract(**settings):
    settings = {"channels": 3, "num_classes": 1000, **settings}
    return nnx.eval_shape(lambda: xception8(rngs=nnx.Rngs(0), **settings))


@pytest.mark.slow
def test_parameter_count_at_1000_classes():
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract(), nnx.Param))) == 22_855_952


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "side", "sides"),
    [(XceptionStem, 299, [147, 74, 37, 19, 10]), (SmallXceptionStem, 32, [32, 16, 8, 4, 2])],
)
def test_sides_and_channels_of_the_flows(stem, side, sides):
    def shapes(model, x):
        found = [x := model.stem(x)]
        for block in model.blocks:
            found.append(x := block(x))
        return found, model.conv2(model.conv1(x))

    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    found, last = nnx.eval_shape(shapes, abstract(stem=stem), images)
    assert len(found) == 13
    stages = [found[index].shape for index in (0, 1, 2, 3, 12)]
    assert [shape[1] for shape in stages] == [shape[2] for shape in stages] == sides
    assert [shape[3] for shape in stages] == [64, 128, 256, 728, 1024]
    assert {out.shape for out in found[3:12]} == {found[3].shape}
    assert last.shape == (2, sides[-1], sides[-1], 2048)


def test_a_narrow_and_shallow_one_keeps_the_proportions():
    model = abstract(width=4, depth=2)
    assert len(model.blocks) == 6
    widths = [model.blocks[index].shortcut.conv.out_features for index in (0, 1, 2, 5)]
    assert [*widths, model.blocks[3].convs[0].pointwise.out_features] == [16, 32, 91, 128, 91]
    assert model.head.in_features == 256


def test_a_separable_convolution_is_one_per_channel_and_one_across():
    conv = SeparableConv(3, 2, rngs=nnx.Rngs(0))
    conv.eval()
    x = jax.random.normal(jax.random.key(1), (1, 3, 3, 3))
    spatial = np.einsum("hwc,hwc->c", x[0], conv.depthwise.kernel[:, :, 0])
    expected = spatial @ np.asarray(conv.pointwise.kernel[0, 0]) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(conv(x)[0, 1, 1], expected, rtol=1e-5, atol=1e-6)


def test_depthwise_kernels_keep_the_variance_of_their_input():
    kernel = SeparableConv(512, 4, rngs=nnx.Rngs(0)).depthwise.kernel[...]
    assert float(jnp.std(kernel)) == pytest.approx(1 / 3, rel=0.05)


def test_a_relu_stands_ahead_of_every_block_but_the_first():
    """Nothing of a negative input comes through the convolutions."""
    activations = [block.activation for block in abstract(depth=0).blocks]
    assert activations == [identity, nnx.relu, nnx.relu, nnx.relu]
    x = -jnp.ones((2, 4, 4, 2))
    np.testing.assert_array_equal(MiddleBlock(2, rngs=nnx.Rngs(0))(x), x)
    block = HalvingBlock(2, (2, 2), rngs=nnx.Rngs(0))
    block.eval()
    np.testing.assert_array_equal(block(x), block.shortcut(x))
