"""Operations that NumPy computes to the same bits as XLA: those that round at most once, and those that only move."""

from collections.abc import Callable, Mapping

import numpy as np


def in_numpy(*arrays: np.ndarray, primitive, params: tuple) -> list[np.ndarray] | None:
    """The result of a JAX primitive on NumPy arrays, or None if it is not one of these.

    Args:
      arrays: the operands.
      primitive: the primitive.
      params: its parameters, as pairs.
    """
    function = OPERATIONS.get(primitive.name)
    if function is None or any(array.dtype.itemsize > 4 for array in arrays):
        return None
    result = function(dict(params), *arrays)
    return None if result is None else [np.asarray(result)]


def _divided(params, x: np.ndarray, y: np.ndarray):
    return x / y if x.dtype == np.float32 else None  # of integers XLA's rounds towards zero


def _broadcast(params, x: np.ndarray, *dynamic):
    if dynamic:
        return None
    ones = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        ones[axis] = size
    return np.broadcast_to(x.reshape(ones), params["shape"])


def _reshaped(params, x: np.ndarray, *dynamic):
    return None if dynamic or params["dimensions"] is not None else x.reshape(params["new_sizes"])


def _selected(params, which: np.ndarray, *cases: np.ndarray):
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 and which.dtype == bool else None


def _plain(function: Callable) -> Callable:
    return lambda params, *arrays: function(*arrays)


OPERATIONS: Mapping[str, Callable] = {
    **{name: _plain(getattr(np, name)) for name in ("sign", "floor", "ceil", "square")},
    "add": _plain(np.add),
    "add_any": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _plain(np.multiply),
    "div": _divided,
    "neg": _plain(np.negative),
    "abs": _plain(np.abs),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "eq": _plain(np.equal),
    "ne": _plain(np.not_equal),
    "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "gt": _plain(np.greater),
    "ge": _plain(np.greater_equal),
    "is_finite": _plain(np.isfinite),
    "copy": _plain(np.copy),
    "select_n": _selected,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *arrays: np.concatenate(arrays, params["dimension"]),
}
