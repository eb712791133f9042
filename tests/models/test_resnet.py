"""ResNet v1.5 and ResNeXt as published: sizes, strides, groups, initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import resnet


@functools.cache  # tracing a deep one takes seconds
def abstract(name, stem=resnet.ImageNetStem, **settings):
    make = functools.partial(getattr(resnet, name), stem, channels=3, width=64, num_classes=1000, **settings)
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11_689_512),
        pytest.param("resnet34", 21_797_672, marks=pytest.mark.slow),
        ("resnet50", 25_557_032),
        pytest.param("resnet101", 44_549_160, marks=pytest.mark.slow),
        pytest.param("resnet152", 60_192_808, marks=pytest.mark.slow),
        pytest.param("resnext50", 25_028_904, marks=pytest.mark.slow),
    ],
)
def test_parameter_count_at_1000_classes(name, parameters):
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract(name), nnx.Param))) == parameters


def test_a_bottleneck_strides_in_its_3x3_convolution():
    block = abstract("resnet50").blocks[3]
    strides = {name: getattr(block, name).strides for name in ("conv1", "conv2", "conv3")}
    assert {name: stride if isinstance(stride, tuple) else (stride, stride) for name, stride in strides.items()} == {
        "conv1": (1, 1),
        "conv2": (2, 2),
        "conv3": (1, 1),
    }
    assert [tuple(block.conv1.kernel_size), tuple(block.conv2.kernel_size)] == [(1, 1), (3, 3)]


@pytest.mark.parametrize(
    ("name", "ends", "channels", "stem", "side", "sides"),
    [
        ("resnet18", (2, 4, 6, 8), 1, resnet.SmallStem, 32, [32, 32, 16, 8, 4]),
        ("resnet50", (3, 7, 13, 16), 4, resnet.ImageNetStem, 224, [56, 56, 28, 14, 7]),
    ],
)
def test_every_stage_after_the_first_halves_the_image_and_doubles_the_channels(name, ends, channels, stem, side, sides):
    model = abstract(name, stem)

    def shapes(model, x):
        found = [x := model.stem(x)]
        for block in model.blocks:
            found.append(x := block(x))
        return found, model.head(jnp.mean(x, axis=(1, 2)))

    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    found, logits = nnx.eval_shape(shapes, model, images)
    stages = [found[0], *(found[end] for end in ends)]
    assert [out.shape[1] for out in stages] == [out.shape[2] for out in stages] == sides
    assert [out.shape[3] for out in stages] == [64, 64 * channels, 128 * channels, 256 * channels, 512 * channels]
    assert logits.shape == (2, 1000)


def strided(x, *, before: int):
    """A 3x3 convolution of ones and of stride 2 over `x` [H, W], zeros around it, its first window `before` outside."""
    height, width = x.shape
    padded = np.pad(np.asarray(x), 2)
    starts = [(2 * i - before + 2, 2 * j - before + 2) for i in range(height // 2) for j in range(width // 2)]
    return np.array([padded[i : i + 3, j : j + 3].sum() for i, j in starts]).reshape(height // 2, width // 2)


@pytest.mark.parametrize(("block", "conv"), [(resnet.BasicBlock, "conv1"), (resnet.Bottleneck, "conv2")])
def test_strided_windows_start_one_pixel_outside_the_image_as_pytorchs_do(block, conv):
    conv = getattr(block(1, 1, 2, rngs=nnx.Rngs(0)), conv)
    conv.kernel[...] = jnp.ones((3, 3, 1, 1))
    x = jnp.arange(16.0).reshape(4, 4)
    np.testing.assert_array_equal(conv(x[None, :, :, None])[0, :, :, 0], strided(x, before=1))
    assert not np.array_equal(strided(x, before=1), strided(x, before=0))


def test_resnexts_3x3_convolutions_have_32_groups_of_4_8_16_and_32_channels():
    blocks = abstract("resnext50").blocks
    kernels = [tuple(blocks[index].conv2.kernel.shape) for index in (0, 3, 7, 13)]
    assert kernels == [(3, 3, 4, 128), (3, 3, 8, 256), (3, 3, 16, 512), (3, 3, 32, 1024)]
    assert {block.conv2.feature_group_count for block in blocks} == {32}


@pytest.mark.parametrize(("width", "groups"), [(64, 32), (16, 32), (24, 16), (8, 16)])
def test_a_narrow_resnext_has_as_many_groups_as_divide_its_channels(width, groups):
    block = nnx.eval_shape(lambda: resnet.ResNeXtBottleneck(width, width, 1, rngs=nnx.Rngs(0)))
    assert (block.conv2.feature_group_count, block.conv2.out_features) == (groups, 2 * width)


@pytest.fixture(scope="module")
def small():
    """Two stages of one block."""
    make = functools.partial(resnet.ResNet, (1, 1), resnet.BasicBlock, resnet.SmallStem)
    return make(channels=1, width=16, num_classes=10, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_block_starts_as_its_shortcut(small):
    x = jnp.abs(jax.random.normal(jax.random.key(0), (2, 4, 4, 16)))
    assert small.blocks[0].shortcut is resnet.identity
    np.testing.assert_array_equal(small.blocks[0](x), x)


def test_shortcuts_convolve_only_where_the_shape_changes(small):
    assert [isinstance(block.shortcut, resnet.Shortcut) for block in small.blocks] == [False, True]
    stages = abstract("resnet18").blocks
    assert [isinstance(block.shortcut, resnet.Shortcut) for block in stages] == [False, False, *[True, False] * 3]


def test_convolutions_have_no_bias_and_kernels_the_variance_of_their_fan_out(small):
    kernel = small.blocks[1].conv2.kernel[...]
    assert small.blocks[1].conv2.bias is None
    assert kernel.shape == (3, 3, 32, 32)
    assert float(jnp.std(kernel)) == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.05)


def test_batch_norms_average_over_ten_steps(small):
    assert (small.stem.norm.momentum, small.stem.norm.epsilon) == (0.9, 1e-5)


def test_evaluation_leaves_the_statistics_alone_and_training_moves_them(small):
    x = np.random.default_rng(0).normal(3.0, size=(2, 8, 8, 1)).astype(np.float32)
    before = np.array(small.stem.norm.mean[...])
    small.eval()
    assert nnx.jit(lambda model, x: model(x))(small, x).shape == (2, 10)
    np.testing.assert_array_equal(small.stem.norm.mean[...], before)
    small.train()
    nnx.jit(lambda model, x: model(x))(small, x)
    assert not np.array_equal(small.stem.norm.mean[...], before)
