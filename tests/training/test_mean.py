"""A mean of parts: adding the parts of any split gives the mean of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.errors import UsageError
from mpjax.training import Mean, RunObjective, as_mean, value_of


def add(*parts):
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)


def floats(*values):
    return jnp.asarray(values, jnp.float32)


# Sums of integers are exact in float32, in any order.
EXAMPLES = st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=50)
@given(examples=EXAMPLES, data=st.data())
def test_the_parts_of_any_split_add_up_to_the_mean_of_the_whole(examples, data):
    def part(rows):
        return Mean(jnp.float32(sum(v * w for v, w in rows)), jnp.float32(sum(w for _, w in rows)))

    cuts = sorted(data.draw(st.lists(st.integers(0, len(examples)), max_size=4)))
    parts = [part(examples[a:b]) for a, b in zip([0, *cuts], [*cuts, len(examples)], strict=True)]
    weights = [w for _, w in examples]
    whole = np.average([v for v, _ in examples], weights=weights) if any(weights) else 0.0
    assert float(add(*parts).value) == pytest.approx(whole, rel=1e-6)


def test_a_part_without_weight_adds_nothing_and_nothing_has_the_mean_zero():
    nothing = Mean(jnp.float32(0), jnp.float32(0))
    assert float(add(nothing, Mean(jnp.float32(6), jnp.float32(3))).value) == 2.0
    assert float(nothing.value) == 0.0


@pytest.mark.parametrize(("total", "weight"), [(1, np.nan), (np.nan, 2), (np.inf, np.inf)])
def test_what_is_not_finite_shows_in_the_value(total, weight):
    assert np.isnan(Mean(jnp.float32(total), jnp.float32(weight)).value)


def test_quotients_are_averaged_over_those_with_a_weight():
    assert float(Mean(floats(1, 0, 6), floats(4, 0, 8)).value) == 0.5


@pytest.mark.parametrize(("dtype", "wanted"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32")])
def test_the_mean_of_examples_is_summed_in_float32(dtype, wanted):
    objective = RunObjective(lambda model, batch, key: {"loss": batch["x"]})
    mean, _ = objective.loss(None, {"x": jnp.full((3, 4), 9000, dtype)}, jax.random.key(0))
    assert (mean.total.dtype, mean.weight.dtype, float(mean.weight)) == (wanted, wanted, 12.0)
    assert float(mean.total) == 12 * float(jnp.asarray(9000, dtype))


def test_a_scalar_has_weight_one_whatever_its_dtype():
    for scalar in (jnp.bfloat16(2), jnp.int32(2), 2.0, True):
        mean = as_mean(scalar, "x")
        assert (mean.total.dtype, mean.weight.dtype) == (jnp.float32, jnp.float32)
        assert (float(mean.total), float(mean.weight)) == (float(scalar), 1.0)


@pytest.mark.parametrize(("total", "weight"), [("float16", "float16"), ("bfloat16", "float32"), ("float32", "int32")])
def test_totals_and_weights_are_added_in_float32(total, weight):
    mean = as_mean(Mean(jnp.asarray(3, total), jnp.asarray(2, weight)), "x")
    assert (mean.total.dtype, mean.weight.dtype, float(mean.value)) == (jnp.float32, jnp.float32, 1.5)


def test_weights_are_constants_of_a_gradient():
    def value(x):
        return as_mean(Mean(3 * x, x), "loss").value

    assert float(jax.grad(value)(jnp.float32(2))) == 1.5  # of 3x / 2, not of 3x / x


def test_what_is_neither_a_scalar_nor_a_mean_is_an_error_that_names_it():
    with pytest.raises(UsageError, match=r"^top5 has shape \(2,\): wanted a scalar, or an mpjax.training.Mean$"):
        as_mean(floats(1, 2), "top5")
    with pytest.raises(UsageError, match=r"^iou is a Mean of a total \(2,\) and a weight \(\): wanted one shape$"):
        as_mean(Mean(floats(1, 2), jnp.float32(1)), "iou")


def test_the_value_of_anything_else_is_itself():
    assert (value_of(3), float(value_of(Mean(jnp.float32(3), jnp.float32(2))))) == (3, 1.5)
