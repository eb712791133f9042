"""Which module is at fault among several that show the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.diagnosis import WITHOUT_ROUNDING, Reference, Site, at_fault, culprit, outputs_of, program_of_model
from mpjax.precision import get_policy


class Lossy(nnx.Module):
    """Adds 1000 and takes it away again, of which bfloat16 keeps multiples of four."""

    def __init__(self):
        self.scale, self.dtype = nnx.Param(jnp.ones(8)), jnp.float32

    def __call__(self, x):
        large = jnp.full(x.shape, 1000, self.dtype)
        return ((x.astype(self.dtype) * self.scale[...].astype(self.dtype)) + large) - large


class Three(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second, self.third = nnx.Linear(8, 8, rngs=rngs), Lossy(), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.third(self.second(self.first(x)))


def loss(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


@pytest.fixture(scope="module")
def step():
    make = functools.partial(program_of_model, Three(), loss, jax.random.normal(jax.random.key(0), (4, 8)))
    full = make(get_policy("float32"))
    return make(get_policy("mixed_bfloat16")), Reference(full, outputs_of(WITHOUT_ROUNDING, full, 1.0), 0.05)


def test_the_culprit_is_the_first_module_without_whose_rounding_a_step_is_healthy(step):
    left, path = culprit(["third", "second", "first"], step[0], 1.0, step[1])
    assert (path, left < 0.05) == ("second", True)


def test_without_one_that_is_enough_it_is_the_best_of_eight(step):
    left, path = culprit(["third"], step[0], 1.0, step[1])
    assert (path, left > 0.05) == ("third", True)
    left, path = culprit([*("nothing",) * 8, "second"], step[0], 1.0, step[1])
    assert (path, left > 0.05) == ("nothing", True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", range(3))
def test_a_step_that_is_not_finite_is_infinitely_far(step, value, place):
    outputs = [np.array(x) for x in step[1].outputs]
    outputs[place].flat[0] = value
    assert step[1].fault(outputs, 1.0) == np.inf


def test_among_equals_it_is_the_most_suspicious(step):
    assert culprit(["nothing", "none"], step[0], 1.0, step[1])[1] == "nothing"


def test_only_in_float8_the_first_reading_may_be_harmless(step):
    program, reference = step
    seen = [(Site(path, "forward", "mul", jnp.dtype("bfloat16"), (8,), ""), None) for path in ("third", "second")]
    assert at_fault(seen, program, 1.0, reference)[0].path == "third"
    in_float8 = dataclasses.replace(reference, without_float8=lambda: reference.outputs)
    assert at_fault(seen, program, 1.0, in_float8)[0].path == "second"
    assert at_fault([], program, 1.0, in_float8) is None
