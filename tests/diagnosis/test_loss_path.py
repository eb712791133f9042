"""The variables that a loss depends on, also inside calls and loops."""

import jax
import jax.numpy as jnp

from mpjax.diagnosis.loss_path import needed_for_loss
from mpjax.precision.casting.walk import bodies


def _needed(function, *args) -> dict[str, bool]:
    program = jax.make_jaxpr(function)(*args)
    needed = needed_for_loss(program)
    eqns = (eqn for body in bodies(program) for eqn in body.eqns)
    return {eqn.primitive.name: not needed.isdisjoint(eqn.outvars) for eqn in eqns}


def test_what_only_the_other_outputs_read_is_not_needed():
    assert _needed(lambda x: (jnp.sin(x), jnp.cos(x)), 1.0) == {"sin": True, "cos": False}


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

    found = _needed(function, 1.0)
    assert {name: found[name] for name in ("sin", "exp", "tanh", "floor", "scan")} == {
        "sin": True,
        "exp": False,
        "tanh": True,
        "floor": False,
        "scan": True,
    }
