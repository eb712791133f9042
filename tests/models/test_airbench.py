"""The small network for CIFAR-10: its frozen first layer, its initial filters, its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.airbench import Airbench, Whitening, dirac


def images(count=64):
    """Neighbouring pixels are alike, as in photographs."""
    noise = np.random.default_rng(0).standard_normal((count, 6, 6, 3)).astype(np.float32)
    return noise.cumsum(1).cumsum(2)


def whitened(x):
    model = Whitening(3)
    model.kernel[...] = jnp.asarray(model.from_images(x)["kernel"])
    return np.asarray(model(jnp.asarray(x))).reshape(-1, 24)


def test_patches_have_no_correlation_and_equal_size():
    y = whitened(images())
    assert y.shape == (64 * 5 * 5, 24)
    np.testing.assert_allclose(y[:, :12].T @ y[:, :12] / len(y), np.eye(12), atol=0.02)
    assert np.array_equal(y[:, 12:], -y[:, :12])


def test_components_without_variance_stay_finite():
    assert np.isfinite(whitened(np.full((2, 6, 6, 3), 0.5, np.float32))).all()


def test_before_it_sees_images_it_copies_the_pixels_of_a_patch():
    x = jnp.asarray(images(1)[:, :2, :2])
    y = Whitening(3)(x).ravel()
    assert np.array_equal(y, jnp.concatenate([x.ravel(), -x.ravel()]))


def test_only_the_bias_of_the_first_layer_is_trained():
    model = Whitening(3)
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))] == [(24,)]
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat))] == [(2, 2, 3, 24)]


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 3), (3, 2)])
def test_a_filter_begins_by_passing_its_inputs_on(inputs, outputs):
    kernel = dirac(nnx.initializers.ones)(jax.random.key(0), (3, 3, inputs, outputs))
    copied = min(inputs, outputs)
    assert np.array_equal(kernel[1, 1, :, :copied], np.eye(inputs, copied))
    assert float(jnp.sum(kernel[..., :copied])) == copied
    assert np.all(np.asarray(kernel[..., copied:]) == 1)


def test_it_has_as_many_parameters_as_published():
    model = nnx.eval_shape(lambda: Airbench(channels=3, num_classes=10, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 1_971_352


def test_images_that_are_too_small_are_an_error():
    model = nnx.eval_shape(lambda: Airbench(channels=1, width=4, num_classes=3, rngs=nnx.Rngs(0)))
    with pytest.raises(
        UsageError, match="airbench needs images of 9x9 pixels or more, got 8x8; write --data.image_size"
    ):
        nnx.eval_shape(lambda model, x: model(x), model, jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32))
