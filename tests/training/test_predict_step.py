"""What the model says about each example, alike on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.precision import get_policy
from mpjax.training import Layout, make_mesh, make_predict_step, outputs_for, take_apart


def as_stored(batch, key):
    assert key is None  # nothing is augmented
    return batch


def outputs(task, model, batch, top=2):
    found = outputs_for(task, as_stored, get_policy("float32"), top=top)(
        model, {k: jnp.asarray(v) for k, v in batch.items()}
    )
    return {name: np.asarray(value) for name, value in found.items()}


def test_classes_are_the_most_probable_first_and_at_most_all():
    logits = jnp.log(jnp.asarray([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]))
    found = outputs("classification", lambda images: logits, {"image": np.zeros((2, 1, 1, 1), np.float32)})
    assert found["classes"].tolist() == [[1, 2], [0, 1]]
    assert found["probabilities"] == pytest.approx(np.asarray([[0.6, 0.3], [0.5, 0.25]]))
    every = outputs(
        "text_classification", lambda t, n: logits, {"tokens": np.zeros((2, 1)), "length": np.ones(2)}, top=9
    )
    assert every["classes"].shape == (2, 3)


@pytest.mark.parametrize(
    ("task", "name", "dtype"),
    [
        ("classification", "image", "float16"),
        ("regression", "row", "float16"),
        ("audio_classification", "sound", "float32"),  # the network casts sounds itself
    ],
)
def test_only_images_and_rows_enter_a_model_in_the_compute_dtype(task, name, dtype):
    taken = []

    def model(x):
        taken.append(str(x.dtype))
        return jnp.zeros((1, 2))

    outputs_for(task, as_stored, get_policy("mixed_float16"), top=1)(model, {name: jnp.ones((1, 4))})
    assert taken == [dtype]


def test_an_output_that_is_not_finite_is_marked():
    logits = jnp.asarray([[0.0, jnp.nan], [0.0, 1.0], [jnp.inf, 0.0]])
    found = outputs("classification", lambda images: logits, {"image": np.zeros((3, 1, 1, 1), np.float32)})
    assert found["finite"].tolist() == [False, True, False]


def test_a_mask_is_the_class_of_each_pixel():
    logits = jnp.asarray([[[[0.0, 1.0], [1.0, 0.0]]]])
    found = outputs("segmentation", lambda images: logits, {"image": np.zeros((1, 1, 2, 1), np.float32)})
    assert (found["mask"].tolist(), found["mask"].dtype) == ([[[1, 0]]], np.uint8)


def test_the_loss_of_a_text_counts_its_own_tokens():
    tokens = np.asarray([[0, 1, 1, 0], [0, 1, 0, 0]])
    uniform = lambda tokens: jnp.zeros((*tokens.shape, 4))  # noqa: E731
    found = outputs("language_modeling", uniform, {"tokens": tokens, "count": np.asarray([3, 1], np.int32)})
    assert found["loss"] == pytest.approx(np.log(4) * np.asarray([3, 1]))
    assert found["tokens"].tolist() == [3, 1]
    assert outputs("language_modeling", uniform, {"tokens": tokens})["tokens"].tolist() == [3, 3]


@pytest.mark.parametrize("size", [4, 3])
def test_several_devices_give_each_row_in_its_place(size):
    """Also where rows do not divide among the devices."""
    assert len(jax.devices()) == 2
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    structure, params, stats = take_apart(model)
    batch = {"x": jnp.arange(2 * size, dtype=jnp.float32).reshape(size, 2)}
    run = lambda model, batch: {"y": model(batch["x"])}  # noqa: E731
    one = make_predict_step(structure, run)(params, stats, batch)
    two = make_predict_step(structure, run, layout=Layout(make_mesh()))(params, stats, batch)
    np.testing.assert_allclose(two["y"], one["y"], rtol=1e-6)
