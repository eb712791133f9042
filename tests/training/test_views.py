"""Test-time augmentation: which views of an image are averaged, with which weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.errors import UsageError
from mpjax.precision import get_policy
from mpjax.training.objective import RunObjective
from mpjax.training.objectives import classification
from mpjax.training.views import mirror, mirror_translate, predict_with


IMAGES = jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 4, 1)
MIRRORED = [[3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8]]


def views_of(weighted):
    return [(weight, np.asarray(view)[0, :, :, 0].tolist()) for weight, view in weighted]


def test_the_mirror_image_counts_as_much_as_the_image():
    assert views_of(mirror(IMAGES)) == [(0.5, np.arange(12).reshape(3, 4).tolist()), (0.5, MIRRORED)]


def test_shifted_images_count_half_and_have_reflected_edges():
    found = views_of(mirror_translate(IMAGES))
    assert [weight for weight, _ in found] == [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert found[:2] == [(0.25, np.arange(12).reshape(3, 4).tolist()), (0.25, MIRRORED)]
    assert found[2][1] == [[5, 4, 5, 6], [1, 0, 1, 2], [5, 4, 5, 6]]  # down to the right
    assert found[4][1] == [[5, 6, 7, 6], [9, 10, 11, 10], [5, 6, 7, 6]]  # up to the left
    for first in (2, 4):
        assert found[first + 1][1] == [row[::-1] for row in found[first][1]]


@pytest.mark.parametrize(
    ("views", "first"),
    [
        ("none", [0, 1]),
        ("mirror", [1.5, 1.5]),
        # Of the first row [0 1 2 3]: half of (0 + 3) / 2, a quarter of (5 + 6) / 2 and a quarter of (5 + 6) / 2.
        ("mirror_translate", [0.5 * 1.5 + 0.25 * 5.5 + 0.25 * 5.5, 0.5 * 1.5 + 0.25 * 4.5 + 0.25 * 6.5]),
    ],
)
def test_evaluation_averages_the_logits_of_the_views_and_training_does_not(views, first):
    predict = predict_with(views, "classification")
    batch = {"image": jnp.concatenate([IMAGES, 2 * IMAGES]), "label": jnp.array([1, 0])}

    def first_two(images):
        return images[:, 0, :2, 0]

    model: Any = first_two  # the first two pixels are the logits of two classes

    objective = RunObjective(classification(get_policy("float32"), predict=predict))
    logits = predict(model, batch["image"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, [first, 2 * np.array(first)], rtol=1e-6)
    values = objective.measure(model, batch)
    np.testing.assert_allclose(values["loss"], -jax.nn.log_softmax(logits)[jnp.arange(2), batch["label"]], rtol=1e-6)
    trained = objective.loss(model, batch, jax.random.key(0))[0].value
    plain = jax.nn.log_softmax(model(batch["image"]))[jnp.arange(2), batch["label"]]
    np.testing.assert_allclose(trained, -jnp.mean(plain), rtol=1e-6)


def test_logits_in_half_precision_are_averaged_in_float32():
    logits = predict_with("mirror", "classification")(
        lambda x: x[:, 0, :1, 0], jnp.array([[[[2048.0], [2050.0]]]], jnp.float16)
    )
    assert (logits.dtype, logits.tolist()) == (jnp.float32, [[2049.0]])  # which float16 does not have


@pytest.mark.parametrize("task", ["segmentation", "text_classification", "language_modeling"])
def test_only_classes_of_whole_images_are_averaged(task):
    with pytest.raises(
        UsageError, match=f"mirror averages the classes of whole images, and --task is {task}; write --"
    ):
        predict_with("mirror", task)
    predict_with("none", task)
