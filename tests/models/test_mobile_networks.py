"""EfficientNet, MobileNetV3, RegNet and DenseNet as published: sizes, strides, the layers of a block, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import (
    DenseNet,
    EfficientNet,
    InvertedResidual,
    SmallStem,
    SqueezeExcitation,
    Transition,
    densenet121,
    efficientnet_b0,
    efficientnet_b4,
    hard_sigmoid_gate,
    identity,
    in_eights,
    mobilenetv3_large,
    mobilenetv3_small,
    regnetx,
    regnetx_004,
    regnety_004,
    relu,
)
from mpjax.precision import apply_policy


def abstract(make, **settings):
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), **{"channels": 3, "num_classes": 1000, **settings}))


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (efficientnet_b0, 5_288_548),
        pytest.param(efficientnet_b4, 19_341_616, marks=pytest.mark.slow),
        (mobilenetv3_large, 5_483_032),
        (mobilenetv3_small, 2_542_856),
        (regnetx_004, 5_157_512),
        (regnety_004, 4_344_144),
        (densenet121, 7_978_856),
    ],
)
def test_parameter_count_at_1000_classes(make, count):
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract(make), nnx.Param))) == count


def sides(model, side, layers):
    def shapes(model, x):
        found = [x := model.stem(x)]
        for layer in layers(model):
            found.append(x := layer(x))
        return found

    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    found = [out.shape[1] for out in nnx.eval_shape(shapes, model, images)]
    return [side for index, side in enumerate(found) if index == 0 or side != found[index - 1]]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [(efficientnet_b0, [16, 8, 4, 2, 1]), (mobilenetv3_small, [16, 8, 4, 2, 1]), (regnety_004, [16, 8, 4, 2, 1])],
)
def test_strides_halve_the_image_and_the_stride_of_the_stem_is_a_setting(make, wanted):
    assert sides(abstract(make, width=8), 32, lambda model: model.blocks) == wanted
    assert sides(abstract(make, width=8, stride=1), 32, lambda model: model.blocks) == [32, *wanted[:-1]]


def test_a_densenet_halves_the_image_between_its_blocks():
    model = abstract(functools.partial(DenseNet, (1, 2, 1), SmallStem), width=8)
    assert sides(model, 9, lambda model: model.layers) == [9, 4, 2]
    assert [layer.conv.out_features for layer in model.layers if isinstance(layer, Transition)] == [6, 7]
    assert model.head.in_features == 11


@pytest.mark.parametrize(("channels", "rounded"), [(1, 8), (11, 16), (12, 16), (18, 24), (19, 24), (20, 24), (52, 56)])
def test_channels_are_multiples_of_eight_and_not_below_nine_tenths(channels, rounded):
    assert in_eights(channels) == rounded


def test_a_narrow_network_keeps_the_proportions():
    model = abstract(efficientnet_b0, width=16)
    assert [block.project.conv.out_features for block in model.blocks][::4] == [8, 24, 56, 96]
    assert (model.stem.conv.out_features, model.head.in_features) == (16, 640)
    assert abstract(mobilenetv3_small, width=8).head.in_features == 512
    assert abstract(regnety_004, width=24).head.in_features == 224  # 220 in groups of 8


@pytest.mark.parametrize(
    ("make", "width", "says"),
    [
        (efficientnet_b0, 12, "multiples of 8, got a width of 12; write 16"),
        (mobilenetv3_small, 4, "multiples of 8, got a width of 4; write 8"),
        (regnety_004, 12, "groups of 8 channels, got a width of 12; write a multiple, .* --model.width 16"),
        (densenet121, 7, "7 is odd"),
    ],
)
def test_a_width_that_the_network_would_not_have_is_refused(make, width, says):
    with pytest.raises(UsageError, match=says):
        abstract(make, width=width)


def test_images_of_which_no_pixel_would_be_left_are_refused():
    model = abstract(densenet121, width=4)
    images = jax.ShapeDtypeStruct((2, 28, 40, 3), jnp.float32)
    with pytest.raises(UsageError, match=r"no pixel is left .*whose image is 1x2 pixels there; .*--model.stem small"):
        nnx.eval_shape(lambda model, x: model(x), model, images)


def test_squeeze_and_excitation_multiplies_each_channel_by_its_gate():
    module = SqueezeExcitation(2, 1, gate=hard_sigmoid_gate, rngs=nnx.Rngs(0))
    module.reduce.kernel[...] = jnp.array([1.0, 2.0]).reshape(1, 1, 2, 1)
    module.expand.kernel[...] = jnp.array([3.0, -3.0]).reshape(1, 1, 1, 2)
    module.expand.bias[...] = jnp.array([0.0, 1.5])
    x = jnp.array([[0.0, 1.0], [0.0, -0.5]]).reshape(1, 1, 2, 2)  # the means are 0 and 0.25: 0.5 after the first layer
    np.testing.assert_allclose(module(x)[0, 0], [[0.0, 0.5], [0.0, -0.25]], atol=1e-6)
    below = module(
        x - jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    )  # the first layer gives -0.5, and ReLU 0: gates 1/2 and 3/4
    np.testing.assert_allclose(below[0, 0], [[-0.5, 0.75], [-0.5, -0.375]], atol=1e-6)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_the_means_of_squeeze_and_excitation_add_up_in_float32(policy):
    module = SqueezeExcitation(2, 1, rngs=nnx.Rngs(0))
    apply_policy(module, policy)
    graph, params = nnx.split(module)
    x = jnp.ones((1, 64, 64, 2), jnp.float16)

    def loss(params, x):
        return nnx.merge(graph, params)(x).astype(jnp.float32).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x))
    assert "f32[1,2] = reduce_sum" in text
    assert "f16[1,2] = reduce_sum" not in text


def block(**settings):
    sizes = {"channels_in": 8, "expanded": 16, "channels_out": 8, "kernel": 3, "stride": 1, **settings}
    return InvertedResidual(**sizes, activation=relu, squeeze=identity, rngs=nnx.Rngs(0))


def test_the_input_is_added_where_the_shape_stays():
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 8))
    for settings, adds in (({}, True), ({"stride": 2}, False), ({"channels_out": 16}, False)):
        one = block(**settings)
        one.project.norm.scale[...] = jnp.zeros_like(one.project.norm.scale[...])
        assert np.array_equal(one(x), x if adds else jnp.zeros_like(one(x)))
    assert block(expanded=8).expand is identity


def test_stochastic_depth_drops_whole_blocks_of_single_examples():
    one = block(drop=0.5)
    x = jax.random.normal(jax.random.key(1), (32, 3, 3, 8))
    dropped = np.all(np.asarray(one(x) - x) == 0, axis=(1, 2, 3))
    assert 4 < dropped.sum() < 28
    rates = [getattr(each.drop, "rate", 0.0) for each in abstract(EfficientNet, drop=0.16).blocks]
    # Of 16 blocks, those that change the shape are never dropped.
    assert rates == pytest.approx([0, 0, 0.02, 0, 0.04, 0, 0.06, 0.07, 0, 0.09, 0.1, 0, 0.12, 0.13, 0.14, 0])


def test_without_dropout_there_are_no_random_streams():
    for make in (efficientnet_b0, mobilenetv3_small, regnety_004):
        assert jax.tree.leaves(nnx.state(abstract(make, width=8), nnx.RngState)) == []


def test_depthwise_kernels_begin_at_the_scale_of_their_own_nine_inputs():
    kernel = block(expanded=512).depthwise.conv.kernel[...]
    assert float(jnp.std(kernel)) == pytest.approx((2 / 9) ** 0.5, rel=0.05)


def test_regnets_last_norms_begin_at_zero():
    model = regnetx((1,), (8,), 8, channels=3, num_classes=2, rngs=nnx.Rngs(0))
    assert np.array_equal(model.blocks[0].norm3.scale[...], np.zeros(8))
