"""Objectives of the user's own: values per example in, means over batches, devices and sets out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.errors import UsageError
from mpjax.training import Mean
from mpjax.training.objective import as_stored
from mpjax.training.user_objective import own_objective, quotients


BATCH = {"x": jnp.arange(4.0), "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
KEY = jax.random.key(0)


def objective(function) -> Any:
    return own_objective(function, as_stored, name="NAME")


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
    values = own.measure(None, BATCH)
    sums = {name: np.sum(np.asarray(value, np.float64)) for name, value in values.items()} | {"count": np.float64(4)}
    assert own.conclude(sums) == {"loss": 1.5, "rate": 1.0}


def test_a_quotient_without_weight_is_nan():
    sums: Any = {"rate": np.float64(0), "rate/weight": np.float64(0), "count": np.float64(3)}
    assert np.isnan(quotients(sums)["rate"])


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
        (lambda x: {"loss": x, "a/weight": x}, "a/weight is the name of something else"),
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
