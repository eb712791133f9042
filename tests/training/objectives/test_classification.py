"""Image classification: what is trained, what is measured, and the one place where images are cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision import get_policy
from mpjax.training import RunObjective, classification, equally, evaluated


class Recording:
    """A model of two classes that remembers its input: the logits are the first two pixels."""

    def __call__(self, images):
        self.seen = images
        return images.reshape(images.shape[0], -1)[:, :2].astype(jnp.float32)


def prepare(batch, key):
    scaled = batch["image"].astype(jnp.float32) / 255
    return {**batch, "image": scaled if key is None else scaled + 1}


BATCH = {
    "image": jnp.array([[[[255], [0]]], [[[0], [51]]]], jnp.uint8),
    "label": jnp.array([0, 0], jnp.int32),
}


@pytest.mark.parametrize(
    ("policy", "dtype"), [("float32", "float32"), ("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16")]
)
def test_images_reach_the_model_in_the_compute_dtype(policy, dtype):
    objective, model = RunObjective(classification(get_policy(policy)), prepare), Recording()
    objective.loss(model, BATCH, jax.random.key(0))
    assert model.seen.dtype == dtype
    objective.measure(model, BATCH)
    assert model.seen.dtype == dtype
    seen = np.asarray(model.seen[:, 0, :, 0], np.float32)
    np.testing.assert_allclose(seen, [[1, 0], [0, 0.2]], rtol=float(jnp.finfo(dtype).eps))


def test_images_are_cast_once():
    """Whatever prepares them, one conversion to the compute dtype is in the program."""
    objective, images = RunObjective(classification(get_policy("mixed_float16"))), jnp.zeros((2, 1, 2, 1))
    jaxpr = jax.make_jaxpr(lambda x: objective.measure(lambda x: x[:, 0, :, 0], {**BATCH, "image": x}))(images)
    casts = [
        e for e in jaxpr.eqns if e.primitive.name == "convert_element_type" and e.invars[0] is jaxpr.jaxpr.invars[0]
    ]
    assert [e.params["new_dtype"] for e in casts] == [np.dtype("float16")]
    # The labels stay integers.
    assert all(e.outvars[0].aval.shape != (2,) or e.params["new_dtype"] != np.dtype("float16") for e in casts)


def test_training_augments_and_smooths_and_evaluation_does_not():
    objective, model = RunObjective(classification(get_policy("float32"), equally(0.5)), prepare), Recording()
    loss, metrics = objective.loss(model, BATCH, jax.random.key(0))
    assert model.seen.max() == 2
    values = objective.measure(model, BATCH)
    assert model.seen.max() == 1
    # Logits [1, 0] and [0, 0.2], label 0.
    np.testing.assert_allclose(values["loss"], [0.31326166, 0.7981389], rtol=1e-6)
    assert values["accuracy"].tolist() == [1, 0]
    # Half of the target is spread over both classes: 0.75 * first + 0.25 * second.
    smoothed = [0.75 * 0.31326166 + 0.25 * 1.3132617, 0.75 * 0.7981389 + 0.25 * 0.5981389]
    assert float(loss.value) == pytest.approx(np.mean(smoothed), rel=1e-6)
    assert float(metrics["accuracy"].value) == 0.5


def test_five_guesses_are_scored_above_ten_classes():
    assert set(evaluated(jnp.zeros((1, 10)), jnp.array([0]))) == {"loss", "accuracy"}
    assert evaluated(jnp.zeros((1, 11)), jnp.array([4]))["top5"].tolist() == [1.0]


def test_a_mixed_target_takes_the_place_of_the_label_in_the_loss_only():
    logits = jnp.log(jnp.array([[1.0, 3.0]]))
    batch = {"label": jnp.array([1]), "target": jnp.array([[0.5, 0.5]])}
    values = equally()(logits, batch, jax.random.key(0))
    assert values["loss"].tolist() == [pytest.approx((np.log(4) + np.log(4 / 3)) / 2, rel=1e-6)]
    assert values["accuracy"].tolist() == [1.0]
