"""U-Net as published: its size, and images of any height and width."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.models import TwoConvs, unet64


def abstract(**settings):
    return nnx.eval_shape(lambda: unet64(rngs=nnx.Rngs(0), **settings))


def test_parameter_count_for_3_channels_and_1_class():
    """That of the usual PyTorch implementation (milesial/Pytorch-UNet, transposed convolutions)."""
    parameters = nnx.state(abstract(channels=3, num_classes=1), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == 31_037_633


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 16), (15, 37), (17, 3), (32, 63)])
def test_every_pixel_of_any_image_gets_logits(height, width):
    model = abstract(channels=2, num_classes=5, width=4)
    images = jax.ShapeDtypeStruct((3, height, width, 2), jnp.float32)
    assert nnx.eval_shape(lambda model, x: model(x), model, images).shape == (3, height, width, 5)


def test_each_level_halves_the_image_and_doubles_the_channels():
    model = abstract(channels=1, num_classes=2, width=8, depth=3)
    assert [convs.conv2.kernel.shape[-1] for convs in model.down] == [8, 16, 32, 64]
    assert [up.up.kernel.shape for up in model.up] == [(2, 2, 64, 32), (2, 2, 32, 16), (2, 2, 16, 8)]
    assert [up.convs.conv1.kernel.shape[2] for up in model.up] == [64, 32, 16]


def test_convolutions_have_no_bias_and_kernels_the_variance_of_their_fan_in():
    convs = TwoConvs(32, 32, rngs=nnx.Rngs(0))
    assert convs.conv1.bias is None
    assert float(jnp.std(convs.conv1.kernel[...])) == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.05)
