"""Every wrapper around an optimizer: the form of its state is that of parameters in any dtype, before and after a step.

A state whose structure, shapes or dtypes change is a traceback under `jax.lax.scan`, in a checkpoint, or at the second
step, which compiles again.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.precision import (
    compensated_weights,
    dynamic_loss_scaling,
    half_moments,
    int8_moments,
    master_weights,
    no_loss_scaling,
    stochastic_weights,
)
from mpjax.precision.float8 import Grouped, float8_moments


@pytest.fixture(autouse=True)
def _promotion():
    """Optax divides by integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def as_it_is(inner):
    return inner


MOMENTS = {"float32": as_it_is, "bfloat16": half_moments, "float8": float8_moments, "int8": int8_moments}
WEIGHTS = {
    "none": as_it_is,
    "copies": master_weights,
    "copies by chance": lambda inner: master_weights(inner, stochastic_rounding=True),
    "kahan": compensated_weights,
    "stochastic": stochastic_weights,
}
NESTED = [(first, second) for first in MOMENTS for second in WEIGHTS]
NESTED += [(first, second) for first in WEIGHTS for second in MOMENTS if second != "float32" and first != "none"]
SCALING = {
    "none": no_loss_scaling,
    "dynamic": dynamic_loss_scaling,
    "by name": lambda inner: dynamic_loss_scaling({"all": inner}),
}
ACCUMULATION = {"1": as_it_is, "2": lambda inner: optax.MultiSteps(inner, 2).gradient_transformation()}
PARAMETERS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "large in half": ("float16", "float32"),
    "small in half": ("float32", "bfloat16"),
}
GRADIENTS = {
    "as the parameters": lambda dtype: dtype,
    "others": lambda dtype: "float16" if dtype == "float32" else "float32",
}


def parameters(name):
    large, small = PARAMETERS[name]
    return {"w": jax.ShapeDtypeStruct((64, 128), large), "b": jax.ShapeDtypeStruct((128,), small)}


def gradients_like(params, dtype):
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype(str(p.dtype))), params)


def form(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, str(leaf.dtype), leaf.weak_type) for leaf in leaves]


def changed(tx, params, gradients):
    """What an update changes of the form of the state, or of the parameters."""
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, gradients, state, params)
    moved = jax.eval_shape(optax.apply_updates, params, updates)
    return [what for what, a, b in (("state", state, after), ("parameters", params, moved)) if form(a) != form(b)]


@pytest.mark.slow
@pytest.mark.parametrize("wrappers", NESTED, ids=" inside ".join)
def test_an_update_keeps_the_form_of_a_state(wrappers):
    """Of 690 combinations: gradients of other dtypes where updates are accumulated or the scale grows."""
    found = {}
    around = [("none", "2"), ("dynamic", "1"), ("by name", "2")]
    table = [(*pair, *more) for pair in around for more in itertools.product(PARAMETERS, GRADIENTS)]
    for scaling, accumulation, names, dtype in table:
        inner = optax.scale_by_adam()
        for wrapper in wrappers:
            inner = (MOMENTS | WEIGHTS)[wrapper](inner)
        tx, params = SCALING[scaling](ACCUMULATION[accumulation](inner)), parameters(names)
        params = {"all": params} if scaling == "by name" else params
        if what := changed(tx, params, gradients_like(params, GRADIENTS[dtype])):
            found[scaling, accumulation, names, dtype] = what
    assert (len(table), found) == (30, {})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wrapper", [float8_moments, half_moments, int8_moments])
def test_moments_without_loss_scaling_have_the_form_that_float32_parameters_give_them(wrapper, dtype):
    tx, params = wrapper(optax.adamw(1e-3)), parameters(dtype)
    assert changed(tx, params, params) == []
    wide = gradients_like(params, lambda _: "float32")
    assert form(jax.eval_shape(tx.init, params)) == form(jax.eval_shape(tx.init, wide))


def test_float8_moments_of_half_parameters_are_in_float8_under_loss_scaling():
    state = jax.eval_shape(no_loss_scaling(float8_moments(optax.adamw(1e-3))).init, parameters("float16"))
    adam = state.inner_state.inner_state[0]
    assert isinstance(adam.mu["w"], Grouped)
    assert [str(leaf.dtype) for leaf in (adam.mu["b"], adam.nu["w"], adam.nu["b"])] == ["float32", *["bfloat16"] * 2]


@pytest.mark.parametrize("wrapper", [float8_moments, half_moments, int8_moments])
def test_moments_square_half_gradients_in_float32(wrapper):
    """The square of 1e-4 is zero in float16."""
    tx, params = wrapper(optax.scale_by_adam(eps=0.0)), {"w": jnp.ones(3, jnp.float16)}
    updates, _ = tx.update({"w": jnp.full(3, 1e-4, jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], 1.0, rtol=1e-3)
