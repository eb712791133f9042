"""Instructions: the tokens of answers count, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import GPT2
from mpjax.precision import get_policy
from mpjax.training import RunObjective, instructions, language_modeling, outputs_for, with_perplexity


BATCH = {
    "tokens": jnp.array([[1, 2, 3, 4, 5, 0, 0], [1, 3, 3, 2, 9, 4, 7]], jnp.int32),
    "answers": jnp.array([[0, 0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0, 1]], bool),
}
COUNTED = np.asarray(BATCH["answers"][:, 1:])


@pytest.fixture(scope="module")
def model():
    return GPT2(vocabulary=11, length=6, width=8, depth=1, heads=2, dropout=0.0, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def losses(model):
    """The loss of every token, [2, 6]."""
    return np.asarray(language_modeling()(model, BATCH, None)["loss"])


def test_metrics_are_per_token_of_an_answer(model, losses):
    objective = RunObjective(instructions(), complete=with_perplexity)
    values = objective.measure(model, BATCH)
    assert values["loss"].weight.tolist() == [2, 2]
    sums = jax.tree.map(lambda x: np.asarray(jnp.sum(x, axis=0)), dict(values)) | {"count": 2.0}
    metrics = objective.conclude(sums)
    assert metrics["loss"] == pytest.approx(losses[COUNTED].mean(), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(np.exp(losses[COUNTED].mean()), rel=1e-6)


@pytest.mark.parametrize("chunk", [0, 5])
def test_gradients_are_those_of_the_mean_over_answers(model, losses, chunk):
    graph, params = nnx.split(model)

    def loss_of(objective):
        def loss(params):
            return RunObjective(objective).loss(nnx.merge(graph, params), BATCH, jax.random.key(0))[0].value

        return jax.jit(jax.value_and_grad(loss))(params)

    def by_hand(model, batch, key):
        return {"loss": jnp.sum(jnp.where(COUNTED, language_modeling()(model, batch, None)["loss"], 0), axis=1) / 2}

    (value, grads), (expected, wanted) = loss_of(instructions(chunk=chunk)), loss_of(by_hand)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_padding_changes_nothing(model):
    other = BATCH | {"tokens": BATCH["tokens"].at[0, 5:].set(jnp.array([7, 8]))}
    before, after = (instructions()(model, batch, None)["loss"].total for batch in (BATCH, other))
    np.testing.assert_array_equal(before, after)


def test_a_batch_without_an_answer_has_no_loss_and_no_gradient(model):
    batch = BATCH | {"answers": jnp.zeros_like(BATCH["answers"])}
    for chunk in (0, 5):
        loss, _ = RunObjective(instructions(chunk=chunk)).loss(model, batch, jax.random.key(0))
        assert (float(loss.total), float(loss.weight)) == (0, 0)


def test_predictions_sum_the_losses_of_answers(model, losses):
    outputs = outputs_for("instructions", lambda batch, key: batch, get_policy("float32"), top=1)(model, BATCH)
    assert outputs["tokens"].tolist() == [2, 2]
    np.testing.assert_allclose(outputs["loss"], np.where(COUNTED, losses, 0).sum(axis=1), rtol=1e-6)
