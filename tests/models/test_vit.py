"""ViT as published: sizes, patches, what the classifier sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import vit


def small(**options):
    settings = {"image_shape": (8, 8, 3), "num_classes": 5, "patch": 4, "width": 16, "depth": 2, "heads": 2}
    return vit.ViT(**{**settings, **options}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param("vit_ti16", 5_717_416, marks=pytest.mark.slow),
        ("vit_s16", 22_050_664),
        pytest.param("vit_b16", 86_567_656, marks=pytest.mark.slow),
    ],
)
def test_parameter_count_at_1000_classes(name, parameters):
    make = getattr(vit, name)
    model = nnx.eval_shape(lambda: make(image_shape=(224, 224, 3), num_classes=1000, pool="cls", rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


@pytest.mark.parametrize(("pool", "positions"), [("gap", 196), ("cls", 197)])
def test_there_is_a_position_for_each_patch_and_one_for_the_class_token(pool, positions):
    model = nnx.eval_shape(lambda: vit.vit_ti16(image_shape=(224, 224, 3), num_classes=2, pool=pool, rngs=nnx.Rngs(0)))
    assert model.positions.get_value().shape == (positions, 192)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["gap", "cls"])
@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 16, 1)])
def test_images_give_logits(shape, pool):
    images = jax.ShapeDtypeStruct((3, *shape), jnp.float32)
    logits = nnx.eval_shape(small(image_shape=shape, pool=pool), images)
    assert logits.shape == (3, 5)


@pytest.mark.slow
def test_without_positions_the_mean_over_patches_does_not_see_their_order():
    model = small(depth=1)
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    swapped = jnp.concatenate([images[:, 4:], images[:, :4]], axis=1)
    assert not np.allclose(model(images), model(swapped), atol=1e-6)
    model.positions[...] = jnp.zeros((4, 16))
    np.testing.assert_allclose(model(images), model(swapped), atol=1e-6)


def test_patches_that_do_not_fit_are_an_error():
    with pytest.raises(
        UsageError, match="images of 8 x 8 pixels cannot be cut into patches of 3 x 3: write --model.patch 2"
    ):
        small(patch=3)


def test_an_unknown_pool_is_an_error():
    with pytest.raises(UsageError, match="pool 'map': wanted 'gap'"):
        small(pool="map")
