"""Loops and branches of an emulated program: which way both runs go, and what is read of the turns."""

import jax
import jax.numpy as jnp
import pytest

from mpjax.diagnosis import Emulator, Recorder


ALMOST_1 = 1 + 2.0**-12
"""Which float16 has not: it is 1 there."""


def emulated(function, *args, **options):
    """The outputs of a function of float16 arrays."""
    args = [jnp.float32(value) for value in args]
    halves = jax.make_jaxpr(lambda *args: function(*(x.astype(jnp.float16) for x in args)))(*args)
    return Emulator(**options).run(halves, args)


def test_both_runs_take_the_branch_of_half_precision():
    (out,) = emulated(lambda x: jax.lax.cond(x > 1, lambda x: x * 8, lambda x: x * 2, x), ALMOST_1)
    assert (float(out.low), float(out.wide)) == (2.0, 2 * ALMOST_1)


def test_both_runs_take_the_branch_of_half_precision_also_in_a_loop():
    def turn(carry, _):
        return jax.lax.cond(carry > 1, lambda x: x * 8, lambda x: x * 2, carry), None

    (out,) = emulated(lambda x: jax.lax.scan(turn, x, None, length=1)[0], ALMOST_1)
    assert (float(out.low), float(out.wide)) == (2.0, 2 * ALMOST_1)


def test_both_runs_go_round_as_often_as_half_precision_decides():
    def function(x):
        return jax.lax.while_loop(lambda s: (s[1] > 1) & (s[0] < 3), lambda s: (s[0] + 1, s[1] * 2), (0, x))

    turns, out = emulated(function, ALMOST_1)
    assert int(turns.low) == int(turns.wide) == 0
    assert (float(out.low), float(out.wide)) == (1.0, ALMOST_1)


def read(function, *args, **options):
    """Of each operation its reading."""
    recorder = Recorder()
    emulated(function, *args, recorder=recorder, **options)
    return {site.operation: reading for site, reading in zip(recorder.sites, recorder.readings(), strict=True)}


def powers(x):
    """x * 2^8, x * 2^16, x * 2^24 and x * 2^32."""
    return jax.lax.scan(lambda carry, _: (carry * 2.0**8, carry), x, None, length=4)


def test_the_turns_of_a_loop_have_one_reading_and_the_fault_begins_once():
    product = read(powers, 1.0)["mul"]
    assert (product.size, product.overflow, product.non_finite) == (4, 1, 3)
    assert product.begins == 1
    assert product.largest == 2.0**8


def test_what_comes_out_of_a_loop_is_known_not_to_be_finite():
    product = read(lambda x: [jnp.sin(y) for y in powers(x)], 1.0)["sin"]
    assert (product.non_finite, product.begins) == (2, 0)


@pytest.mark.parametrize(("isolated", "error"), [(False, 1.0), (True, 0.0)])
def test_isolated_a_loop_begins_with_the_reference_s_values(isolated, error):
    def function(x):
        small = x * 2.0**-20 * 2.0**12  # of 2^-8 first 2^-28, which float16 has not, and then 2^-16, which it has
        with jax.named_scope("loop"):
            return jax.lax.scan(lambda carry, _: (carry + carry, None), small, None, length=10)[0]

    reading = read(function, 2.0**-8, isolated=isolated)["add"]
    assert reading.relative_error == error


def test_an_unrounded_module_in_a_branch_of_a_loop_stays_unrounded():
    def larger(x):
        with jax.named_scope("kept"):
            return x * 2.0**8

    def turn(carry, _):
        return jax.lax.cond(carry > 0, larger, lambda x: x, carry), None

    def last(x):
        return jax.lax.scan(turn, x, None, length=1)[0]

    assert float(emulated(last, 2.0**10)[0].low) == float("inf")
    assert float(emulated(last, 2.0**10, rounds=lambda path: path != "kept")[0].low) == 2.0**18
