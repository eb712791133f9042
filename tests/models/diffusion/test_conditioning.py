"""What the networks of diffusion are told: times in float32, labels, and nothing at first."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.config import Model
from mpjax.data import Image, labelled_images
from mpjax.errors import UsageError
from mpjax.models import build_model
from mpjax.models.diffusion import DiT, sines
from mpjax.precision import apply_policy


def test_sines_are_those_of_the_time_at_falling_frequencies():
    wanted = [np.cos(999.0), np.cos(9.99), np.sin(999.0), np.sin(9.99)]
    assert sines(jnp.array([999]), 4)[0].tolist() == pytest.approx(wanted, abs=1e-4)
    assert sines(jnp.array([0]), 4)[0].tolist() == [1, 1, 0, 0]


SMALL = {
    "dit_s2": Model(name="dit_s2", width=8, depth=2, heads=2),
    "unet_ddpm": Model(name="unet_ddpm", width=8, depth=1),
}
FIELDS = labelled_images(3, (6, 6, 1))
IMAGES = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, 6, 6, 1)), jnp.float32)


def randomised(name, policy, fields=FIELDS, **settings):
    """A network none of whose arrays is zero."""
    model = build_model(dataclasses.replace(SMALL[name], **settings), fields=fields, rngs=nnx.Rngs(0))
    random = np.random.default_rng(1)
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.2, x.shape), x.dtype), nnx.state(model)))
    apply_policy(model, policy)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_outputs_are_zero_at_first(name):
    model = build_model(SMALL[name], fields=FIELDS, rngs=nnx.Rngs(0))
    assert not np.any(model(IMAGES, jnp.array([0, 999]), jnp.array([0, 3])))


@pytest.mark.parametrize("name", SMALL)
def test_neighbouring_times_and_labels_are_told_apart_in_bfloat16(name):
    """In bfloat16, 998 and 999 are one number."""
    model = nnx.jit(randomised(name, "mixed_bfloat16"))
    same = jnp.concatenate([IMAGES[:1]] * 2).astype(jnp.bfloat16)
    for times, labels in (([998, 999], [0, 0]), ([5, 5], [0, 3])):
        one, other = model(same, jnp.array(times), jnp.array(labels))
        assert one.dtype == jnp.float32
        assert float(jnp.max(jnp.abs(one - other))) > 1e-3


@pytest.mark.parametrize("name", SMALL)
def test_images_without_labels_have_networks_without_classes(name):
    model = randomised(name, "float32", fields={"image": Image((6, 6, 1))})
    assert model.condition.labels is None
    assert model(IMAGES, jnp.array([0, 1])).shape == IMAGES.shape
    with pytest.raises(UsageError, match="of no classes is called with labels"):
        model(IMAGES, jnp.array([0, 1]), jnp.array([0, 1]))
    with pytest.raises(UsageError, match="of 3 classes is called with no labels"):
        randomised(name, "float32")(IMAGES, jnp.array([0, 1]))


def test_images_of_odd_sides_come_back_in_their_size():
    fields = {"image": Image((7, 5, 2))}
    model = nnx.eval_shape(lambda: randomised("unet_ddpm", "float32", fields=fields, depth=2))
    shape = jax.ShapeDtypeStruct((2, 7, 5, 2), jnp.float32)
    assert nnx.eval_shape(lambda m, x: m(x, jnp.zeros(2, jnp.int32)), model, shape).shape == (2, 7, 5, 2)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="6 x 6 pixels cannot be cut into patches of 4 x 4: write --model.patch 3"):
        build_model(Model(name="dit_s2", patch=4), fields=FIELDS, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="a DiT of width 10 has no positions.*write --model.width 12"):
        build_model(Model(name="dit_s2", width=10, heads=2), fields=FIELDS, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="7 sines of the time.* write --model.width 8"):
        build_model(Model(name="unet_ddpm", width=7), fields=FIELDS, rngs=nnx.Rngs(0))


def test_dit_xl_has_as_many_parameters_as_published_without_a_variance():
    """The original has 675,129,632, of which the positions of 256 patches are no parameters here."""

    def build():
        sizes = {"width": 1152, "depth": 28, "heads": 16, "patch": 2}
        return DiT(image_shape=(32, 32, 4), num_classes=1000, **sizes, rngs=nnx.Rngs(0))

    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(build), nnx.Param)))
    assert count == 675_129_632 - 256 * 1152 - 2 * 2 * 4 * 1153
