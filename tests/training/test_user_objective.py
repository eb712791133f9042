"""Objectives of the user's own: values per example in, means over batches, devices and sets out."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpjax.errors import UsageError
from mpjax.training import Mean
from mpjax.training.eval_step import weighted_sums
from mpjax.training.objective import RunObjective
from mpjax.training.user_objective import checked_objective, used_arguments


BATCH = {"x": jnp.arange(4.0), "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
KEY = jax.random.key(0)


def objective(function) -> Any:
    return RunObjective(checked_objective(function, name="NAME"))


def test_loss_and_metrics_are_means_over_examples():
    loss, metrics = objective(lambda model, batch, key: {"loss": batch["x"], "big": batch["x"] > 2}).loss(
        None, BATCH, KEY
    )
    assert (float(loss.total), float(loss.weight)) == (6.0, 4.0)
    assert float(metrics["big"].value) == 0.25


def test_terms_of_examples_are_weighted_by_their_number():
    """Tokens: two examples of 3 and 1 terms have the mean of 4 terms, not the mean of two means."""
    terms = Mean(jnp.array([6.0, 10.0]), jnp.array([3.0, 1.0]))
    loss, _ = objective(lambda model, batch: {"loss": terms}).loss(None, {"x": jnp.zeros(2)}, KEY)
    assert float(loss.value) == 4.0


def test_a_set_is_evaluated_by_its_sums():
    own = objective(lambda model, batch, key: {"loss": batch["x"], "rate": Mean(batch["x"], jnp.array([1.0, 2, 3, 0]))})
    assert own.conclude(weighted_sums(own.measure(None, BATCH), BATCH)) == {"loss": 1.0, "rate": 0.5}


def test_the_key_is_none_in_evaluation():
    seen = []

    def function(model, batch, key):
        seen.append(key)
        return {"loss": batch["x"]}

    own = objective(function)
    own.loss(None, BATCH, KEY)
    own.measure(None, BATCH)
    assert seen == [KEY, None]


def test_outputs_are_no_metric():
    own = objective(lambda model, batch: {"loss": batch["x"], "outputs": {"any": jnp.zeros((4, 2))}})
    assert list(own.measure(None, BATCH)) == ["loss"]
    assert own.loss(None, BATCH, KEY)[1] == {}


def test_half_precision_is_summed_in_float32():
    """Forty values of 2,000 are 80,000, beyond float16."""
    batch = {"x": jnp.full(40, 2000, jnp.float16)}
    loss, _ = objective(lambda model, batch: {"loss": batch["x"]}).loss(None, batch, KEY)
    assert loss.total.dtype == jnp.float32
    assert float(loss.total) == 80000.0


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: x.mean(), "NAME returned .*; wanted a dict with `loss`"),
        (lambda x: {"cost": x}, "NAME returned a mapping of cost; wanted a dict with `loss`"),
        (lambda x: {"loss": None}, r"NAME: loss is None: wanted one value per example, \[4\]"),
        (lambda x: {"loss": x.mean()}, r"NAME: loss has shape \(\) for a batch of 4: wanted one value per example"),
        (lambda x: {"loss": x[:3]}, r"NAME: loss has shape \(3,\)"),
        (lambda x: {"loss": x, "finite": x}, "finite is the name of something else"),
    ],
)
def test_other_results_are_errors_that_say_what_is_wanted(result, said):
    own = objective(lambda model, batch: result(batch["x"]))
    with pytest.raises(UsageError, match=said):
        own.loss(None, BATCH, KEY)
    with pytest.raises(UsageError, match=said):
        own.measure(None, BATCH)


def test_a_function_of_other_parameters_is_an_error():
    with pytest.raises(UsageError, match=r"wanted a function of \(model, batch\) or \(model, batch, key\)"):
        objective(lambda model: {})


X = jax.ShapeDtypeStruct((3,), jnp.float32)


def test_an_argument_counts_if_a_result_depends_on_its_value():
    assert used_arguments(lambda x, y: jnp.sin(x["a"]) + y.size, {"a": X, "b": X}, X) == (
        {"a": True, "b": False},
        False,
    )


def test_the_gradient_of_integers_depends_on_nothing():
    assert used_arguments(jax.grad(lambda x: jnp.argmax(x).astype(jnp.float32)), X) == (False,)
    assert used_arguments(jax.grad(lambda x: jnp.sum(jax.lax.stop_gradient(x) ** 2)), X) == (False,)
    assert used_arguments(jax.grad(lambda x: jnp.sum(x**2)), X) == (True,)


def test_a_compiled_function_is_one_operation_that_uses_all_it_is_given():
    assert used_arguments(jax.jit(lambda x, y: x + 1), X, X) == (True, True)
