"""The one walk through a jaxpr: values of any kind, and every equation with the scope it stands in."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpjax.precision.casting import equations, evaluated, is_recomputed


X = jnp.arange(3.0)
W = jnp.eye(3)


def test_values_may_be_anything_that_the_caller_gives_a_meaning():
    """Here texts: what each result is made of."""
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.tanh(x * 2.0) + y)(1.0, 1.0)
    outputs = evaluated(
        jaxpr,
        ["x", "y"],
        constant=lambda atom, value: f"{float(value):g}",
        apply=lambda eqn, scope, operands, debug: [f"{eqn.primitive.name}({', '.join(operands)})"],
    )
    assert outputs == ["add(tanh(mul(x, 2)), y)"]


def test_a_value_is_let_go_of_once_its_last_use_has_read_it():
    class Held:
        pass

    alive = []

    def apply(eqn, scope, operands, debug):
        operands.clear()
        alive.append(sum(ref() is not None for ref in refs))
        value = Held()
        refs.append(weakref.ref(value))
        return [value]

    given = [Held()]
    refs = [weakref.ref(given[0])]
    jaxpr = jax.make_jaxpr(lambda x: lax.sin(lax.cos(lax.exp(x))))(1.0)
    evaluated(jaxpr, iter([given.pop()]), lambda atom, value: value, apply)
    assert alive == [0, 0, 0]


def test_what_an_equation_reads_comes_in_its_scope():
    def fn(x):
        with jax.named_scope("inner"):
            return jnp.tanh(x)

    def apply(eqn, scope, operands, debug):
        seen.append((scope, eqn.primitive.name, float(operands[0])))
        return [np.tanh(operands[0])]

    seen = []
    evaluated(jax.make_jaxpr(fn)(0.5), [np.float64(0.5)], lambda atom, value: value, apply, "outer")
    assert seen == [("outer/inner", "tanh", 0.5)]


def layer(x):
    """Two scopes, one in the other: `layer/conv` has the product, `layer` the tanh."""
    with jax.named_scope("layer"):
        with jax.named_scope("conv"):
            x = x @ W
        return jnp.tanh(x)


BODIES = {
    "scan": lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=2)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, layer(c[1])), (0, x))[1],
    "cond": lambda x: lax.cond(x[0] > 0, layer, lambda x: x, x),
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "vmap": lambda x: jax.vmap(layer)(x[None])[0],
    "checkpoint in scan": lambda x: lax.scan(lambda c, _: (jax.checkpoint(layer)(c), None), x, None, length=2)[0],
    "jit in checkpoint": jax.checkpoint(jax.jit(layer)),
}
NO_DERIVATIVE = ("while",)


def scopes(fn, *primitives):
    return {scope for scope, eqn in equations(jax.make_jaxpr(fn)(X)) if eqn.primitive.name in primitives}


def net(body):
    def fn(x):
        with jax.named_scope("net"):
            return jnp.sum(body(x))

    return fn


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_scopes_inside_control_flow_are_joined_to_those_around_it(body):
    assert scopes(net(body), "dot_general") == {"net/layer/conv"}
    assert scopes(net(body), "tanh") == {"net/layer"}


@pytest.mark.parametrize("name", [name for name in BODIES if name not in NO_DERIVATIVE])
@pytest.mark.parametrize("of", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,)), jax.checkpoint])
def test_derivatives_stand_in_the_scopes_of_what_they_are_of(name, of):
    assert scopes(of(net(BODIES[name])), "dot_general") == {"net/layer/conv"}
    assert scopes(of(net(BODIES[name])), "tanh") == {"net/layer"}


@pytest.mark.parametrize("name", ["scan", "jit", "cond"])
@pytest.mark.parametrize(
    "of",
    [
        lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]),
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x[None]))),
        lambda f: jax.jit(jax.grad(jax.jit(f))),
        lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x))),
    ],
    ids=["vmap of grad", "grad of vmap", "jit of grad of jit", "grad of grad"],
)
def test_transformations_of_transformations_leave_no_trace_in_scopes(name, of):
    assert scopes(of(net(BODIES[name])), "dot_general") == {"net/layer/conv"}


def test_names_with_brackets_points_and_spaces_are_kept():
    def fn(x):
        with jax.named_scope("my block"), jax.named_scope("layers.3[a]"):
            return jnp.tanh(x).sum()

    assert scopes(fn, "tanh") == {"my block/layers.3[a]"}
    assert scopes(jax.grad(fn), "tanh") == {"my block/layers.3[a]"}


def test_the_functions_of_a_scatter_and_of_a_reduction_are_not_entered():
    def fn(x):
        return x.at[0].apply(jnp.sin), lax.reduce(x, 0.0, lambda a, b: a * b + 1.0, (0,))

    found = [eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(fn)(X))]
    assert "scatter" in found
    assert not {"sin", "mul"} & set(found)


def test_what_a_backward_pass_computes_again_is_told_from_its_own_operations():
    def fn(x):
        return jnp.sum(jnp.sin(jnp.sin(x)))

    found = [eqn for _, eqn in equations(jax.make_jaxpr(jax.grad(jax.checkpoint(fn)))(X))]
    again = [eqn.primitive.name for eqn in found if is_recomputed(eqn)]
    assert again.count("sin") == 1
    assert "mul" not in again
    assert [eqn.primitive.name for eqn in found].count("mul") == 2
    assert not any(is_recomputed(eqn) for _, eqn in equations(jax.make_jaxpr(jax.grad(fn))(X)))
