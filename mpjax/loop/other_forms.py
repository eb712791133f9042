"""Adds to a checkpoint's arrays what a state has in another form: weights with a compensation, moments in float8.

Nothing that a run has kept is lost when another one goes on from its checkpoint with other settings of precision.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.float8.moments import Grouped, grouped, ungrouped


PARAMS = "params/"
MASTERS = "opt_state/inner_state/masters/"
_COMPENSATION = "opt_state/inner_state/compensation/"

_FIELDS = tuple(f"/{field}" for field in Grouped._fields)
_VALUES = "/values"


def with_weights(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays by path, with the master weights and compensations that follow from each other.

    A parameter with a compensation is the sum of both. What is wanted as a compensation is what rounding leaves over of
    a master weight, or of a wider parameter.

    Args:
      saved: the arrays of a checkpoint by path.
      wanted: the leaves of the state to resume by path.
    """
    found = dict(saved)
    for path, rest in saved.items():
        name = path.removeprefix(_COMPENSATION)
        if name != path and PARAMS + name in saved:
            found.setdefault(MASTERS + name, saved[PARAMS + name].astype(FLOAT32) + rest.astype(FLOAT32))
    for path, leaf in wanted.items():
        name = path.removeprefix(_COMPENSATION)
        is_there = path in saved and saved[path].dtype == leaf.dtype
        if name != path and PARAMS + name in saved and not is_there:
            found[path] = _left_over(saved[PARAMS + name], found.get(MASTERS + name), leaf.dtype)
    return found


def _left_over(param: Any, master: Any, dtype: np.dtype) -> Any:
    """Returns what a parameter in `dtype` lacks of its master weight, or of the saved parameter if it has none."""
    exact = param if master is None else master
    stored = param if param.dtype == dtype else exact
    with np.errstate(over="ignore", under="ignore"):  # of the parameter itself, the resumed run is told
        return (exact.astype(FLOAT32) - stored.astype(dtype).astype(FLOAT32)).astype(dtype)


def with_moments(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays by path, with moments in float8 where they are wanted so, and as plain arrays where they are not.

    Args:
      saved: the arrays of a checkpoint by path.
      wanted: the leaves of the state to resume by path.
    """
    found = dict(saved)
    for path in wanted.keys() - saved.keys():
        whole = path.removesuffix(_VALUES)
        if whole != path and whole in saved:
            parts = _beside(saved[whole], _grouped(saved[whole].astype(FLOAT32), jnp.uint32(0)))
            found |= {whole + field: part for field, part in zip(_FIELDS, parts, strict=True)}
        elif path + _VALUES in saved:
            stored = Grouped(*(saved[path + field] for field in _FIELDS))
            found[path] = _beside(stored.values, _ungrouped(stored))
    return found


def _beside(like: Any, found: Any) -> Any:
    """Returns arrays on the host if `like` is there, else where they are; one of its shape on the same devices."""
    if not isinstance(like, jax.Array):
        return jax.device_get(found)
    return jax.tree.map(lambda x: jax.device_put(x, like.sharding) if x.shape == like.shape else x, found)


def without_field(path: str) -> str:
    """Returns the path of the moment that an array of a float8 moment belongs to; other paths as they are."""
    return next((path.removesuffix(field) for field in _FIELDS if path.endswith(field)), path)


_grouped = jax.jit(grouped)
_ungrouped = jax.jit(ungrouped)
