"""The variables that belong to the derivative of a loss, also inside calls and loops."""

import jax
import jax.numpy as jnp

from mpjax.diagnosis import only_in_derivative
from mpjax.precision.casting import bodies


def _in_derivative(function, *args) -> dict[str, bool]:
    program = jax.make_jaxpr(function)(*args)
    variables = only_in_derivative(program)
    eqns = (eqn for body in bodies(program) for eqn in body.eqns)
    return {eqn.primitive.name: not variables.isdisjoint(eqn.outvars) for eqn in eqns}


def test_what_only_the_other_outputs_read_is_in_the_derivative():
    assert _in_derivative(lambda x: (jnp.sin(x), jnp.cos(x)), 1.0) == {"sin": False, "cos": True}


def test_metrics_that_nothing_reads_and_gradients_of_zero_are_not():
    def function(x):
        jnp.exp(x)
        return jnp.sin(x), jnp.broadcast_to(0.0, (3,))

    assert _in_derivative(function, 1.0) == {"exp": False, "sin": False, "broadcast_in_dim": False}


def test_a_call_and_a_loop_are_looked_into():
    @jax.jit
    def called(x):
        return jnp.sin(x), jnp.exp(x)

    def step(carry, _):
        return jnp.tanh(carry), jnp.floor(carry)

    def function(x):
        first, second = called(x)
        last, every = jax.lax.scan(step, first, None, length=3)
        return last, second, every

    found = _in_derivative(function, 1.0)
    assert {name: found[name] for name in ("sin", "exp", "tanh", "floor", "scan")} == {
        "sin": False,
        "exp": True,
        "tanh": False,
        "floor": True,
        "scan": False,
    }
