"""Which arguments a result depends on."""

import jax
import jax.numpy as jnp

from mpjax.training.user_objective_check import used_arguments


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
