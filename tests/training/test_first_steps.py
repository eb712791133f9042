"""The first steps of an update rule, computed on small arrays."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from mpjax.training import begins_finite


ONE, TWO = ({name: jax.ShapeDtypeStruct((50, 3), jnp.float32)} for name in ("one", "two"))


def divides(at):
    """A rule whose step number `at` divides by zero."""

    def update(updates, count, params=None):
        return jax.tree.map(lambda u: u / jnp.where(count == at, 0, 1).astype(u.dtype), updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_steps_are_finite_or_not():
    assert begins_finite(optax.sgd(0.1), ONE)
    assert not begins_finite(divides(0), ONE)
    assert not begins_finite(divides(2), ONE)


def test_prodigy_needs_a_rate_above_zero_at_its_first_step():
    assert begins_finite(contrib.prodigy(1.0), ONE)
    assert not begins_finite(contrib.prodigy(optax.linear_schedule(0.0, 1.0, 4)), ONE)


def test_the_first_parameters_that_a_rule_can_be_computed_on_decide():
    def of_two(rule):
        return optax.multi_transform({"rule": rule}, lambda params: {name: {"two": "rule"}[name] for name in params})

    assert not begins_finite(of_two(divides(0)), ONE, TWO)
    assert begins_finite(of_two(divides(0)), ONE)
