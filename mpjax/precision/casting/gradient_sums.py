"""Sums the gradients of a half-precision array in float32 where many reads of it, or repeats, would add them up."""

import collections
import math
from typing import Any

import jax
from jax.extend import core

from mpjax.precision.casting.jaxprs import as_function, at_indices, opened, scan_counts
from mpjax.precision.casting.one_equation import bind
from mpjax.precision.casting.primitives import (
    ADDING,
    DERIVED,
    PICKS,
    REPEATS,
    SCATTERED_PICKS,
    SCATTERED_SUMS,
    STRETCH,
)
from mpjax.precision.casting.values import Value
from mpjax.precision.casting.walk import bodies, called, held_by
from mpjax.precision.dtypes import FLOAT32, HALF, is_floating


MANY = 8
"""The smallest number of reads whose gradients are added in float32. Fewer terms lose less than 1 %."""


@jax.custom_jvp
def adding_to(wide: jax.Array, array: jax.Array) -> jax.Array:
    """Passes `array` through unchanged; its cotangent, cast to float32, is added to the cotangent of `wide` instead.

    No computation reads `wide`, so that its gradient is the float32 sum over all calls with the same `wide`.

    >>> import jax.numpy as jnp
    >>> def read(x):
    ...     wide, array = x.astype(jnp.float32), jax.lax.stop_gradient(x)
    ...     return sum(adding_to(wide, array).astype(jnp.float32) for _ in range(300))
    >>> float(jax.grad(read)(jnp.bfloat16(1)))
    300.0

    Args:
      wide: the array in float32.
      array: the array in half precision, without a derivative of its own.
    """
    del wide
    return array


@adding_to.defjvp
def _(primals, tangents):
    return adding_to(*primals), tangents[0].astype(primals[1].dtype)


def with_sum(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes the arguments `(wide, array)` of `adding_to` from a half-precision array, once for all reads of it.

    They are a copy in float32, and the array without a derivative. The gradient of the array is then the sum that the
    reads add up in float32, rounded once.
    """
    return array.astype(FLOAT32), jax.lax.stop_gradient(array)


def _reads(body) -> collections.Counter:
    """Counts how often each variable is an operand of an equation."""
    return collections.Counter(atom for eqn in body.eqns for atom in eqn.invars if not isinstance(atom, core.Literal))


class ManyReads:
    """Sums the gradient in float32 of each half-precision variable that a jaxpr reads `MANY` times or more.

    Make one for each run of the jaxpr, whose body it takes.
    """

    def __init__(self, body):
        self._many = {var for var, count in _reads(body).items() if count >= MANY}
        self._sums: dict[core.Var, tuple[jax.Array, jax.Array]] = {}

    def operands(self, eqn, inputs: list[Value]) -> list[Value]:
        """Replaces the operands of an equation that are half-precision variables with many reads.

        A replaced operand has the same number and dtype; the gradients of all its reads are added in float32. Other
        operands stay unchanged.
        """
        return [self._read(var, value) for var, value in zip(eqn.invars, inputs, strict=True)]

    def _read(self, var, value: Value) -> Value:
        if isinstance(var, core.Literal) or var not in self._many or not is_half(value.array):
            return value
        if var not in self._sums:
            self._sums[var] = with_sum(value.array)
        return value._replace(array=adding_to(*self._sums[var]))


def adds_in_half(jaxpr) -> bool:
    """True if a program, including the programs inside it, or its derivative adds many terms in half precision.

    Many are `MANY` or more. Cumulative sums, and sums over windows or devices, count with any number of terms.
    """
    body = opened(jaxpr)[0]
    rules = [eqn for eqn in body.eqns if eqn.primitive.name in DERIVED]
    inner = (held for eqn in body.eqns if eqn.primitive.name not in DERIVED for held in held_by(eqn))
    return (
        _body_adds(body)
        or any(map(adds_in_half, inner))
        or any(rule_adds_in_half(eqn, body.debug_info) for eqn in rules)
    )


def rule_adds_in_half(eqn, debug_info) -> bool:
    """True if a function with a derivative rule of its own, or that rule, adds many terms in half precision.

    What the derivative of its body would add does not count: the rule replaces it. Also True if the rule cannot be
    traced here.
    """
    if not any(_is_half(var) for body in bodies(called(eqn)) for inner in body.eqns for var in inner.invars):
        return False
    function, avals = as_function(eqn, debug_info), [var.aval.update(weak_type=False) for var in eqn.invars]
    moving = [index for index, aval in enumerate(avals) if is_floating(aval)]

    def pulled(*arrays):
        of_floats = at_indices(lambda *full: [*filter(is_floating, function(*full))], arrays, moving)
        outputs, pull = jax.vjp(of_floats, *(arrays[index] for index in moving))
        return outputs, pull(outputs)

    try:
        traced = jax.make_jaxpr(pulled)(*avals)
    except Exception:  # mesh axes have no names here; the interpreter checks again where they have
        return True
    return any(_adds_now(body) for body in bodies(traced))


def _adds_now(body) -> bool:
    """True if the program `body` itself, not its derivative, adds many terms of half precision.

    That is `MANY` `add_any` or more, or one reduction, scan or scatter that adds many. Products do not count.
    """
    halves = [eqn for eqn in body.eqns if any(map(_is_half, eqn.invars))]
    names = collections.Counter(eqn.primitive.name for eqn in halves)
    return names["add_any"] >= MANY or any(_adds(eqn) for eqn in halves if eqn.primitive.name in _ADDS_NOW)


def _body_adds(body) -> bool:
    reads = _reads(body)
    casts = (eqn for eqn in body.eqns if eqn.primitive.name == "convert_element_type")
    of_integers = {eqn.outvars[0] for eqn in casts if not is_floating(eqn.invars[0].aval)}
    # `jnp.pad` casts its default, an integer, which has no gradient.
    adding = (
        eqn for eqn in body.eqns if _adds(eqn) and not (eqn.primitive.name == "pad" and eqn.invars[1] in of_integers)
    )
    return any(count >= MANY and _is_half(var) for var, count in reads.items()) or any(adding)


_ADDS_NOW = ADDING | {"reduce_sum", "scan"}


def _adds(eqn) -> bool:
    name, operands, params = eqn.primitive.name, eqn.invars, eqn.params
    if name == "scan":
        return params["length"] >= MANY and any(map(_is_half, operands[: scan_counts(params)[0]]))
    if name in ADDING | PICKS | {"reduce_sum"}:
        always = name in ADDING - SCATTERED_SUMS
        return _is_half(operands[0]) and (always or adds_between_casts(eqn))
    if name == "all_gather":
        return _is_half(operands[0]) and gathers_from_many(eqn)
    size = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0
    if name == "gather":
        return _is_half(operands[0]) and size >= MANY * math.prod(params["slice_sizes"])
    if name in REPEATS or name in STRETCH:
        operands = [operands[REPEATS[name]]] if name in REPEATS else operands
        return any(_is_half(operand) and size >= MANY * math.prod(operand.aval.shape) > 0 for operand in operands)
    return False


def adds_between_casts(eqn) -> bool:
    """True if an equation must run in float32 instead of half precision: it or its derivative may add many terms.

    The operands' dtype is not checked. The casts before and after the equation change no value that it moves or picks.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in PICKS | SCATTERED_SUMS and "window_dimensions" in params:
        return math.prod(params["window_dimensions"]) >= MANY * math.prod(params["window_strides"])
    if name in SCATTERED_SUMS | SCATTERED_PICKS:  # all updates may go to one element
        return math.prod(eqn.invars[1].aval.shape[:-1]) >= MANY
    if name in PICKS or name == "reduce_sum":
        return math.prod(eqn.invars[0].aval.shape) >= MANY * math.prod(eqn.outvars[0].aval.shape) > 0
    return name in REPEATS


def gathers_from_many(eqn) -> bool:
    """True for an `all_gather` of `MANY` devices or more, whose derivative adds the cotangents of all devices."""
    return eqn.params["axis_size"] >= MANY


def all_gather(eqn, array: Any) -> jax.Array:
    """Gathers from all devices in half precision. The derivative adds their cotangents in float32."""

    @jax.custom_jvp
    def gather(array):
        return bind(eqn.primitive, [array], eqn.params)[0]

    @gather.defjvp
    def _(primals, tangents):
        (array,), (tangent,) = primals, tangents
        return gather(array), gather(tangent.astype(FLOAT32)).astype(array.dtype)

    return gather(array)


def _is_half(atom) -> bool:
    return not isinstance(atom, core.Literal) and is_half(atom.aval)


def is_half(array) -> bool:
    """True for an array, or its abstract value, in half precision; a Python number has no dtype."""
    return getattr(array, "dtype", None) in HALF
