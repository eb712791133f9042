"""What the versions of JAX disagree on about jaxprs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax.precision.casting.jaxprs import (
    as_function,
    equations,
    is_recomputed,
    open_shardings,
    opened,
    scan_counts,
    scope_of,
)


X = jnp.arange(3.0)
W = jnp.eye(3)


def test_a_closed_jaxpr_opens_to_its_body_and_constants():
    body, consts = opened(jax.make_jaxpr(lambda x: x + X)(X))
    assert len(body.invars) == 1
    assert [const.tolist() for const in consts] == [[0.0, 1.0, 2.0]]


def test_a_scan_tells_its_constants_from_its_carries():
    def scan(x, y):
        return lax.scan(lambda carry, _: ((carry[0] + x, carry[1] * y), None), (x, y), None, length=2)

    body, _ = opened(jax.make_jaxpr(scan)(X, X))
    (eqn,) = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
    assert scan_counts(eqn.params) == (2, 2)


def test_an_equation_is_a_function_of_all_its_inputs_repeated_and_literal_ones():
    body, _ = opened(jax.make_jaxpr(lambda x: lax.mul(x, x))(2.0))
    assert as_function(body.eqns[-1], body.debug_info)(5.0, 5.0) == [25.0]
    body, _ = opened(jax.make_jaxpr(lambda x: lax.add(x, 3.0))(2.0))
    assert as_function(body.eqns[-1], body.debug_info)(5.0, 3.0) == [8.0]


def test_shardings_left_to_the_compiler_are_none():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert open_shardings((sharding, object())) == (sharding, None)


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


def test_what_stands_in_no_scope_has_an_empty_one():
    (eqn,) = jax.make_jaxpr(jnp.tanh)(X).eqns
    assert (scope_of(eqn), scope_of(eqn, "outer")) == ("", "outer")


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


@pytest.mark.parametrize(
    ("stack", "scope"),
    [
        ("a/b", "a/b"),
        ("a/b/a/b", "a/b/a/b"),  # a module in one of its own name
        ("a/a/b", "a/a/b"),
        ("jvp(a)/0", "a/0"),
        ("jvp(a)/0/jvp(b)", "a/0/b"),
        ("jvp(a)/0/jvp(a)/0", "a/0"),
        ("c/jvp(a)/0/jvp(a)/0", "c/a/0"),
        ("transpose(jvp(a))/0", "a/0"),
        ("transpose(jvp(a))/0/jvp(a)/0", "a/0"),
        ("c/transpose(jvp(a))/0/jvp(a)/0", "c/a/0"),
        ("jvp(a)/checkpoint/rematted_computation/b", "a/b"),
    ],
)
def test_a_scope_is_what_transformations_leave_of_the_name_stack(stack, scope):
    """A derivative rule that is traced where it runs, and what is transposed of a checkpoint, state the path twice."""
    assert scope_of(SimpleNamespace(source_info=SimpleNamespace(name_stack=stack))) == scope
