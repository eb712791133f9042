"""Text classification: tokens and their number to the class of a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training import RunObjective, equally, text_classification


class Counting:
    """A model of two classes: the logit of the first is the length, in float16."""

    def __call__(self, tokens, lengths):
        assert tokens.dtype == lengths.dtype == jnp.int32
        return jnp.stack([lengths, jnp.zeros_like(lengths)], axis=-1).astype(jnp.float16)


BATCH = {
    "tokens": jnp.zeros((2, 5), jnp.int32),
    "length": jnp.array([1, 3], jnp.int32),
    "label": jnp.array([0, 1], jnp.int32),
}


def test_loss_and_accuracy_in_float32():
    values = RunObjective(text_classification()).measure(Counting(), BATCH)
    np.testing.assert_allclose(values["loss"], [0.31326166, 3.0485873], rtol=1e-6)
    assert values["accuracy"].tolist() == [1, 0]
    loss, metrics = RunObjective(text_classification()).loss(Counting(), BATCH, jax.random.key(0))
    assert (loss.value.dtype, float(loss.value)) == (jnp.float32, pytest.approx((0.31326166 + 3.0485873) / 2))
    assert float(metrics["accuracy"].value) == 0.5


def test_smoothing_is_for_training_only():
    objective = RunObjective(text_classification(equally(1.0)))
    loss, _ = objective.loss(Counting(), BATCH, jax.random.key(0))
    # Half a target for either class: the mean of both negative log-likelihoods.
    assert float(loss.value) == pytest.approx((0.31326166 + 1.3132617 + 3.0485873 + 0.0485873) / 4)
    assert objective.measure(Counting(), BATCH)["loss"].tolist() == pytest.approx([0.31326166, 3.0485873])
