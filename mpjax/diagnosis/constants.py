"""Matches each constant of the half-precision program with its float32 value.

Tracing rounds the literals in a model's code: in float16 an epsilon of 1e-8 is zero, and 1e6 is inf. The reference
needs their float32 values, which the float32 program contains. Both programs are traced from the same code. Except for
casts they have the same operations in the same order, so a constant is matched by its position.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from mpjax.diagnosis.arithmetic import is_half
from mpjax.precision.casting.jaxprs import opened
from mpjax.precision.casting.walk import equations, held_by
from mpjax.precision.dtypes import is_floating


class Constants(NamedTuple):
    """The float32 values of the constants in a half-precision program.

    Attributes:
      exact: the value in the float32 program, by the `id` of a literal or of a constant's variable.
      complete: True if the half-precision program, with these constants and without rounding, computes the same as the
        float32 program: all floating operations were matched, and there is no branch and no `while` loop. Otherwise the
        float32 program itself must run.
      by_itself: True if the float32 program contains half precision, because the code casts to it under any policy.
    """

    exact: Mapping[int, np.ndarray] = {}
    complete: bool = True
    by_itself: bool = False


def constants_of(half, full) -> Constants:
    """Matches the constants of two closed jaxprs of the same code.

    Args:
      half: the jaxpr in half precision; the ids in `Constants.exact` are of its atoms.
      full: the jaxpr in float32.
    """
    exact: dict[int, np.ndarray] = {}
    agreed = list(_matched(half, full, exact))
    halves = (is_half(var.aval) for _, eqn in equations(full) for var in eqn.outvars)
    return Constants(exact, all(agreed), any(halves))


def _matched(half, full, exact: dict) -> Iterator[bool]:
    """Fills `exact`, as in `Constants`, and yields for each comparison of the two programs whether they agree."""
    first, second = _Origins(half), _Origins(full)
    in_half, in_float32 = first.operations, second.operations
    pairs = list(_in_step(in_half, in_float32))
    yield len(pairs) == len(in_half) == len(in_float32)
    for eqn, other in pairs:
        yield len(eqn.invars) == len(other.invars) and eqn.primitive.name not in _DECIDE
        for atoms in zip(eqn.invars, other.invars, strict=False):
            yield _same(first.constant(atoms[0]), second.constant(atoms[1]), exact)
        for bodies in zip(held_by(eqn), held_by(other), strict=False):
            yield from _matched(*bodies, exact)
    for atoms in zip(first.outvars, second.outvars, strict=False):
        yield _same(first.constant(atoms[0]), second.constant(atoms[1]), exact)


_DECIDE = ("cond", "while")
"""Control flow that may depend on floating values, also by way of integers. The emulator decides it with the
half-precision values alone.
"""


def _in_step(in_half: Sequence, in_float32: Sequence) -> Iterator[tuple[Any, Any]]:
    """Yields the pairs of equations of two programs that match in primitive and in shapes of results, in order.

    Equations without a match are left out.
    """
    keys, others = ([_key(eqn) for eqn in eqns] for eqns in (in_half, in_float32))
    if keys == others:
        yield from zip(in_half, in_float32, strict=True)
        return
    for block in difflib.SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
        yield from zip(in_half[block.a : block.a + block.size], in_float32[block.b : block.b + block.size], strict=True)


def _key(eqn) -> tuple:
    """The properties by which equations of two programs are matched: the primitive, and the shapes of the results."""
    return eqn.primitive.name, tuple(getattr(var.aval, "shape", None) for var in eqn.outvars)


def _same(in_half: tuple[int, np.ndarray] | None, in_float32: tuple[int, np.ndarray] | None, exact: dict) -> bool:
    """Records the float32 value of a constant in `exact`. Returns False if the two programs do not match here.

    They match if both have a constant of one shape, whose float32 value does not differ from one recorded before, or if
    neither has a constant. `in_half` is the id and the value of the constant in the half-precision program,
    `in_float32` in the float32 program.
    """
    if in_half is None or in_float32 is None:
        return in_half is in_float32
    value = in_float32[1].astype(np.float32)
    # Two calls may share one body. Its constant then needs the same float32 value in both calls.
    return value.shape == in_half[1].shape and np.array_equal(
        exact.setdefault(in_half[0], value), value, equal_nan=True
    )


class _Origins:
    """Finds in one jaxpr the operations to match (floating ones except casts, and control flow) and its constants."""

    def __init__(self, jaxpr):
        body, consts = opened(jaxpr)
        self.outvars = body.outvars
        self.operations = [eqn for eqn in body.eqns if _is_floating_operation(eqn) or eqn.primitive.name in _DECIDE]
        self._casts = {eqn.outvars[0]: eqn.invars[0] for eqn in body.eqns if _is_cast(eqn)}
        self._values = dict(zip(body.constvars, consts, strict=True))

    def constant(self, atom) -> tuple[int, np.ndarray] | None:
        """The id and the value of the floating constant behind an atom, through casts; None without a constant."""
        while not isinstance(atom, core.Literal) and atom in self._casts:
            atom = self._casts[atom]
        if not is_floating(atom.aval):
            return None
        if isinstance(atom, core.Literal):
            return id(atom), np.asarray(atom.val, getattr(atom.aval, "dtype", None))
        return (id(atom), np.asarray(self._values[atom])) if atom in self._values else None


def _is_floating_operation(eqn) -> bool:
    return not _is_cast(eqn) and any(is_floating(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _is_cast(eqn) -> bool:
    return eqn.primitive.name == "convert_element_type" and is_floating(eqn.invars[0].aval)
