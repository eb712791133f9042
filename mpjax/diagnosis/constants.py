"""The constants of float32's program, each beside the one that stands for it in the half-precision program.

A number that a model's code writes is rounded when its step is traced: in float16 an epsilon of 1e-8 is zero, and 1e6
is inf. The reference needs the numbers that float32 has there. Both programs come from the same code, so they have the
same operations in the same order but for casts, and a constant's counterpart stands where it does.
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
    """What the constants of a half-precision program are in float32.

    Attributes:
      exact: by `id` of a literal, or of the variable of a constant: its value in float32's program.
      complete: whether the first program with these constants and without rounding is the second: all floating
        operations were matched, and no branch or number of turns depends on values. If not, float32's program has to be
        run itself.
      by_itself: whether float32's program has half precision in it, which the code asks for whatever the policy.
    """

    exact: Mapping[int, np.ndarray] = {}
    complete: bool = True
    by_itself: bool = False


def constants_of(half, full) -> Constants:
    """Matches two closed jaxprs of the same code.

    Args:
      half: in half precision; the ids are of what it holds.
      full: in float32.
    """
    exact: dict[int, np.ndarray] = {}
    agreed = list(_matched(half, full, exact))
    halves = (is_half(var.aval) for _, eqn in equations(full) for var in eqn.outvars)
    return Constants(exact, all(agreed), any(halves))


def _matched(half, full, exact: dict) -> Iterator[bool]:
    """Fills `exact`; yields whether each part of the first program has its counterpart."""
    first, second = _Origins(half), _Origins(full)
    mine, theirs = first.operations, second.operations
    pairs = list(_in_step(mine, theirs))
    yield len(pairs) == len(mine) == len(theirs)
    for one, other in pairs:
        yield len(one.invars) == len(other.invars) and not _depends_on_values(one)
        for atoms in zip(one.invars, other.invars, strict=False):
            yield _same(first.constant(atoms[0]), second.constant(atoms[1]), exact)
        for bodies in zip(held_by(one), held_by(other), strict=False):
            yield from _matched(*bodies, exact)
    for atoms in zip(first.outvars, second.outvars, strict=False):
        yield _same(first.constant(atoms[0]), second.constant(atoms[1]), exact)


def _depends_on_values(eqn) -> bool:
    """Whether what runs depends on floating values, for which the emulator asks the half-precision run alone."""
    if eqn.primitive.name == "while":
        condition = opened(eqn.params["cond_jaxpr"])[0]
        return any(is_floating(atom.aval) for each in condition.eqns for atom in each.invars)
    return eqn.primitive.name == "cond"


def _in_step(mine: Sequence, theirs: Sequence) -> Iterator[tuple[Any, Any]]:
    """Equations of two programs that do the same, in order."""
    keys, others = ([_key(eqn) for eqn in eqns] for eqns in (mine, theirs))
    if keys == others:
        yield from zip(mine, theirs, strict=True)
        return
    for block in difflib.SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
        yield from zip(mine[block.a : block.a + block.size], theirs[block.b : block.b + block.size], strict=True)


def _key(eqn) -> tuple:
    return eqn.primitive.name, tuple(getattr(var.aval, "shape", None) for var in eqn.outvars)


def _same(mine: tuple[int, np.ndarray] | None, theirs: tuple[int, np.ndarray] | None, exact: dict) -> bool:
    """Notes the counterpart of a constant; returns whether both are constants of one shape, or neither is one."""
    if mine is None or theirs is None:
        return mine is theirs
    value = theirs[1].astype(np.float32)
    # A body that two calls share has one counterpart, or none that can be told.
    return value.shape == mine[1].shape and np.array_equal(exact.setdefault(mine[0], value), value, equal_nan=True)


class _Origins:
    """The floating operations of a body without its casts, and where its values come from."""

    def __init__(self, jaxpr):
        body, consts = opened(jaxpr)
        self.outvars = body.outvars
        self.operations = [eqn for eqn in body.eqns if _is_floating_operation(eqn)]
        self._casts = {eqn.outvars[0]: eqn.invars[0] for eqn in body.eqns if _is_cast(eqn)}
        self._values = dict(zip(body.constvars, consts, strict=True))

    def constant(self, atom) -> tuple[int, np.ndarray] | None:
        """The id and the value of the constant that an atom is, cast or not; None if it is none."""
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
