"""Repairs: the fewest modules in float32, a lower loss scale instead of some, and what no module is the place of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import (
    Fault,
    Finding,
    Reference,
    emulated,
    is_repaired_outside,
    program_of_function,
    smallest_rules,
    with_lower_scale,
)
from mpjax.precision import get_policy


PARAMS = {"large": jnp.full((1, 1), 2.0**10), "small": jnp.ones((1, 1))}
BATCH = jnp.ones((1, 1))


def loss_fn(params, x):
    """2^20 forward in net/large; in net/small gradients of four times the loss scale; float32 outside of both."""
    with jax.named_scope("net"):
        with jax.named_scope("large"):
            large = x * 2.0**10 @ params["large"]
        with jax.named_scope("small"):
            small = x * 4.0 @ params["small"]
    return jnp.sum(small.astype(jnp.float32)) + jnp.sum(large.astype(jnp.float32)) * 2.0**-20


def fault_of(loss_fn, scale, policy="mixed_float16"):
    make = functools.partial(program_of_function, loss_fn, PARAMS, BATCH)
    policy = get_policy(policy)
    program = make(policy)
    trace = emulated(program, scale)
    reference = Reference(program, [np.asarray(x) / scale for x in trace.wide], 0.05)
    return Fault(make, policy, program, trace, scale, reference)


OVERFLOW = Finding("overflow", None, "Too large.")


def test_only_the_module_at_fault_is_kept_in_float32():
    assert smallest_rules(fault_of(loss_fn, 1.0)) == {"net/large": "float32"}


def test_a_lower_scale_takes_the_place_of_the_rules_that_it_makes_needless():
    fault = fault_of(loss_fn, 2.0**15)
    rules = smallest_rules(fault)
    assert len(rules) != 1
    finding, fewer = with_lower_scale(OVERFLOW, rules, fault)
    assert fewer == {"net/large": "float32"}
    assert finding.better_scale == 2.0**9
    assert finding.evidence.startswith("Too large. ")
    assert "32768" in finding.evidence
    assert "512" in finding.evidence


@pytest.mark.parametrize(
    ("verdict", "rules", "scale"),
    [
        ("underflow", {"a": "float32", "b": "float32"}, 1024.0),
        ("overflow", {"a": "float32"}, 1024.0),
        ("overflow", {}, 1.0),
    ],
)
def test_no_scale_is_looked_for_where_it_could_not_be_better(verdict, rules, scale):
    finding = Finding(verdict, None, "")
    fault = Fault(None, None, None, None, scale, None)  # of which nothing else is asked
    assert with_lower_scale(finding, rules, fault) == (finding, rules)


def outside(params, x):
    with jax.named_scope("net"):
        y = x @ params["small"]
    return jnp.sum((y.astype(jnp.float16) * 2.0**10 * 2.0**10).astype(jnp.float32)) * 2.0**-20


@pytest.mark.parametrize(("function", "repaired"), [(outside, True), (loss_fn, False)])
def test_float32_outside_of_modules_repairs_what_is_wrong_there_alone(function, repaired):
    fault = fault_of(function, 1.0)
    assert is_repaired_outside(fault.program, 1.0, fault.reference) == repaired
