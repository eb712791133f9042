"""What the versions of JAX disagree on about jaxprs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax.precision.casting import as_function, open_shardings, opened, scan_counts, scope_of


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


def test_what_stands_in_no_scope_has_an_empty_one():
    (eqn,) = jax.make_jaxpr(jnp.tanh)(X).eqns
    assert (scope_of(eqn), scope_of(eqn, "outer")) == ("", "outer")


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
