"""Regression: losses in float32, targets that no policy rounds, metrics of a whole set in the units of the data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from mpjax.precision import get_policy
from mpjax.precision.casting import autocast
from mpjax.training import (
    RunObjective,
    absolute_error,
    huber,
    loss_named,
    regression_in_order,
    regression_objective,
    squared_error,
)


OUTPUTS = jnp.array([[0.5, 0.0], [-2.0, 3.0]])
TARGET = jnp.array([[0.0, 0.0], [1.0, 3.0]])


def test_losses_are_those_computed_by_hand():
    assert squared_error(OUTPUTS, TARGET).tolist() == [0.125, 4.5]
    assert absolute_error(OUTPUTS, TARGET).tolist() == [0.25, 1.5]
    assert huber(OUTPUTS, TARGET, delta=1.0).tolist() == [0.0625, 1.25]
    assert huber(OUTPUTS, TARGET, delta=2.0).tolist() == [0.0625, 2.0]
    assert loss_named("huber", 2.0)(OUTPUTS, TARGET).tolist() == [0.0625, 2.0]
    assert loss_named("mae", 1.0) is absolute_error


def test_gradients_of_losses_are_finite_for_errors_beyond_float16():
    far = jnp.full((1, 1), 1e20)
    for loss in (absolute_error, loss_named("huber", 1.0)):
        assert jax.grad(lambda x, loss=loss: loss(x, jnp.zeros((1, 1)))[0])(far).tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_outputs_are_compared_in_float32(dtype):
    # 1.0009766 is 1 in float16 and bfloat16: a target that was rounded would have no error.
    target = jnp.array([[1.0 + 2**-11]], jnp.float32)
    loss = squared_error(jnp.ones((1, 1), dtype), target)
    assert (loss.dtype, loss.tolist()) == (jnp.float32, [2.0**-22])


class Linear:
    """A model whose outputs are the inputs."""

    def __call__(self, row):
        return row


def rounding_casts(jaxpr, value):
    """The dtypes narrower than float32 that `value`, an input of a jaxpr, is cast to."""
    return [
        e.params["new_dtype"]
        for e in jaxpr.eqns
        if e.primitive.name == "convert_element_type" and value in e.invars and e.params["new_dtype"].itemsize < 4
    ]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "O1"])
@pytest.mark.parametrize("key", [True, False])
def test_no_policy_rounds_a_target(policy, key):
    chosen = get_policy(policy)
    objective = regression_objective(get_policy("float32") if policy == "O1" else chosen, (1.0,), squared_error)

    def values(row, target):
        found = objective(Linear(), {"row": row, "target": target}, jax.random.key(0) if key else None)
        return {name: value for name, value in found.items() if name != "outputs"}

    function = autocast(values, chosen) if policy == "O1" else values
    row, target = jnp.zeros((1, 1)), jnp.full((1, 1), 123457.0)
    jaxpr = jax.make_jaxpr(function)(row, target).jaxpr
    assert rounding_casts(jaxpr, jaxpr.invars[1]) == []
    assert function(row, target)["loss"].tolist() == [np.float32(123457.0) ** 2]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_rows_reach_the_model_in_the_compute_dtype(policy):
    class Recording:
        def __call__(self, row):
            self.seen = row.dtype
            return row

    model = Recording()
    regression_objective(get_policy(policy), (1.0,), squared_error)(model, {"row": OUTPUTS, "target": TARGET}, None)
    assert model.seen == get_policy(policy).compute_dtype


def set_metrics(outputs, target, std, batches):
    """The metrics of a set that is evaluated in batches, the last of them padded."""
    objective = RunObjective(
        regression_objective(get_policy("float32"), std, squared_error), complete=regression_in_order
    )
    sums = []
    for rows in batches:
        values = objective.measure(Linear(), {"row": outputs[np.asarray(rows)], "target": target[np.asarray(rows)]})
        sums.append(jax.tree.map(lambda x: np.asarray(x, np.float64).sum(axis=0), values) | {"count": len(rows)})
    return objective.conclude(jax.tree.map(lambda *x: sum(x), *sums))


def test_metrics_are_scikit_learns_of_the_whole_set_in_the_units_of_the_data():
    rng = np.random.default_rng(0)
    target = rng.normal(size=(70, 2))
    outputs = target + 0.3 * rng.normal(size=(70, 2))
    std, mean = np.array([50_000.0, 0.01]), np.array([400_000.0, 3.0])
    batches = np.split(np.arange(70), [64, 68])  # means of batches would be others
    values = set_metrics(jnp.float32(outputs), jnp.float32(target), tuple(std), batches)
    true, predicted = target * std + mean, outputs * std + mean
    assert list(values) == ["loss", "rmse", "mae", "mse", "r2"]
    assert values["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(true, predicted), rel=1e-6)
    assert values["rmse"] == pytest.approx(sklearn_metrics.root_mean_squared_error(true, predicted), rel=1e-6)
    assert values["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(true, predicted), rel=1e-6)
    assert values["r2"] == pytest.approx(sklearn_metrics.r2_score(true, predicted), rel=1e-6)


def test_r2_of_equal_targets_is_none():
    values = set_metrics(jnp.ones((4, 1)), jnp.full((4, 1), 0.3), (1.0,), [range(4)])
    assert np.isnan(values["r2"])
    assert values["rmse"] == pytest.approx(0.7)
