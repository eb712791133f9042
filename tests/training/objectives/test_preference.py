"""Preferences: the loss of DPO, its gradients, and the model before training as the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import GPT2, Adapter, add_lora
from mpjax.training import RunObjective, language_modeling, log_probabilities, preference


BATCH = {
    "tokens": jnp.array([[1, 2, 3, 4, 5, 0, 0], [1, 3, 3, 2, 9, 4, 7]], jnp.int32),
    "answers": jnp.array([[0, 0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0, 1]], bool),
    "rejected": jnp.array([[1, 2, 3, 8, 8, 8, 0], [1, 3, 3, 2, 9, 4, 6]], jnp.int32),
    "rejected_answers": jnp.array([[0, 0, 0, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0, 1]], bool),
}


PREFERRED, OTHER = ("tokens", "answers"), ("rejected", "rejected_answers")


def gpt2(dropout=0.0):
    return GPT2(vocabulary=11, length=6, width=8, depth=1, heads=2, dropout=dropout, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module", params=["lora", "dora"])
def models(request):
    """A model before training, and with adapters that have been trained."""
    before, model = gpt2(), gpt2()
    add_lora(model, ["blocks/*"], rank=2, variant=request.param, rngs=nnx.Rngs(1))
    _, adapters, _ = nnx.split(model, Adapter, ...)
    keys = iter(jax.random.split(jax.random.key(2), 99))
    nnx.update(model, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), adapters))
    return before, model


def sums(model, tokens, answers):
    """The log-probabilities of the answers of each row, added in float64."""
    losses = np.asarray(language_modeling()(model, {"tokens": BATCH[tokens]}, None)["loss"], np.float64)
    return -(losses * np.asarray(BATCH[answers][:, 1:])).sum(axis=1)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_loss_is_that_of_equation_7(models, beta):
    before, model = models
    ratios = [sums(model, *names) - sums(before, *names) for names in (PREFERRED, OTHER)]
    margin = beta * (ratios[0] - ratios[1])
    values = preference(beta=beta)(model, BATCH, None)
    np.testing.assert_allclose(values["chosen"], beta * ratios[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values["margin"], margin, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values["loss"], -np.log(1 / (1 + np.exp(-margin))), rtol=1e-5)
    np.testing.assert_array_equal(values["accuracy"], (margin > 0).astype(np.float32))


def test_gradients_are_those_of_equation_7_and_none_passes_the_reference(models):
    """By hand: -beta * sigmoid(-margin) times the difference of both gradients, averaged over the batch."""
    _, model = models
    graph, adapters, rest = nnx.split(model, Adapter, ...)

    @jax.jit
    def found(adapters):
        def loss(adapters):
            merged = nnx.merge(graph, adapters, rest)
            return RunObjective(preference(beta=0.5)).loss(merged, BATCH, jax.random.key(0))[0].value

        return jax.grad(loss)(adapters)

    @jax.jit
    def expected(adapters):
        def difference(adapters):
            merged = nnx.merge(graph, adapters, rest)
            losses = language_modeling()
            chosen, rejected = (
                jnp.sum(
                    jnp.where(BATCH[marks][:, 1:], losses(merged, {"tokens": BATCH[name]}, None)["loss"], 0), axis=1
                )
                for name, marks in (PREFERRED, OTHER)
            )
            return rejected - chosen

        margin = preference(beta=0.5)(model, BATCH, None)["margin"]
        factors = -0.5 * jax.nn.sigmoid(-margin) / 2
        return jax.vjp(difference, adapters)[1](factors)[0]

    for one, other in zip(jax.tree.leaves(found(adapters)), jax.tree.leaves(expected(adapters)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_model_that_has_not_been_trained_prefers_nothing():
    """Though its dropout is on: the reference has none, and new adapters change nothing."""
    model = gpt2()
    add_lora(model, ["blocks/*"], rank=2, rngs=nnx.Rngs(1))
    values = preference(beta=0.1)(model, BATCH, None)
    np.testing.assert_array_equal(values["margin"], [0, 0])
    np.testing.assert_allclose(values["loss"], np.log(2), rtol=1e-6)


def test_the_reference_has_no_dropout():
    model = gpt2(dropout=0.5)
    add_lora(model, ["blocks/*"], rank=2, rngs=nnx.Rngs(1))
    model.train()
    tokens, answers = (jnp.concatenate([BATCH[one], BATCH[two]]) for one, two in zip(PREFERRED, OTHER, strict=True))
    noisy = log_probabilities(nnx.clone(model), tokens, answers)[:2]
    chosen = preference(beta=1.0)(model, BATCH, jax.random.key(0))["chosen"]
    model.eval()
    np.testing.assert_allclose(chosen, noisy - sums(model, *PREFERRED), rtol=1e-4, atol=1e-5)
    assert not np.allclose(chosen, 0, atol=1e-3)
