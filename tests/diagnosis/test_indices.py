"""An index out of range, for which JAX reads NaN, is told as such."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose, diagnose_function


X = jax.random.normal(jax.random.key(0), (4, 8))


@pytest.mark.parametrize("options", [{"mode": "clip"}, {"mode": "fill", "fill_value": 0}])
def test_an_index_out_of_range_that_does_no_harm_is_not_to_blame(options):
    def loss_fn(table, batch):
        harmless = table.at[batch["far"]].get(**options)
        return jnp.sum(harmless + table.at[batch["near"]].get(mode="fill"))

    found = diagnose_function(loss_fn, jnp.ones(8), {"far": jnp.array([99]), "near": jnp.array([9])})
    assert "an index is out of range, 9 of 8, such as" in found.evidence


def test_a_gather_in_a_loop_is_passed_over():
    def loss_fn(table, batch):
        turned, _ = jax.lax.scan(lambda rows, _: (rows[jnp.array([2, 0, 1])], None), table, None, length=2)
        return jnp.sum(turned.at[batch].get(mode="fill"))

    found = diagnose_function(loss_fn, jnp.ones(3), jnp.array([9]))
    assert "an index is out of range, 9 of 3, such as" in found.evidence


LABELS = {"one too many": [0, 1, 4, 2], "nine": [0, 1, 9, 2], "far below": [0, -9, 1, 2]}


@pytest.mark.parametrize(
    "name", ["far below", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one too many", "nine"))]
)
def test_a_label_out_of_range_is_told_as_an_index(name):
    model, labels = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jnp.array(LABELS[name])

    def loss_fn(model, x):
        logits = model(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    found = diagnose(model, loss_fn, X)
    assert (found.verdict, found.operation, found.rules) == ("not_precision", "gather", {})
    index = {"one too many": 4, "nine": 9, "far below": -5}[name]  # JAX adds 4 to what is below 0
    assert f"an index is out of range, {index} of 4, such as a label of no class, in gather" in found.evidence
