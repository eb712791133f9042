"""The dtype of each primitive under autocast, as lists that can be printed and extended.

The lists follow torch.amp's for CUDA (PyTorch, aten/src/ATen/autocast_mode.h), with JAX primitives.
"""

import dataclasses
import difflib
from collections.abc import Iterable

from jax.extend.core import primitives

from mpjax.errors import UsageError
from mpjax.precision.casting.primitives import ADDING, ENTERED, MATRIX_PRODUCTS


LOW = MATRIX_PRODUCTS

FULL = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log1p", "log2", "pow", "integer_pow", "square", "rsqrt"),
        *("acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh", "tan"),
        *("erf_inv", "lgamma", "digamma", "polygamma", "igamma", "igammac", "zeta", "regularized_incomplete_beta"),
        *("reduce_sum", "reduce_prod", "reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp"),
        *("psum", "psum_invariant", "reduce_scatter"),
    }
)

# Primitives that contain a program or fix a number format, and linear algebra that JAX has only in 32 bits and more.
AS_TRACED = frozenset(
    {
        *("reduce", "reduce_window", "select_and_scatter", "select_and_gather_add", "custom_linear_solve"),
        *("bitcast_convert_type", "complex", "fft", "get", "swap", "random_gamma", "igamma_grad_a"),
        *("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr", "schur", "svd"),
        *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
    }
)

# Primitives that JAX does not export, but that work in any floating dtype.
_UNEXPORTED = frozenset(
    {
        *("split", "tile", "scatter-sub", "optimization_barrier", "mesh_cast", "reshard"),
        *("pvary", "pcast", "psum_invariant", "all_gather_invariant", "all_gather_reduced", "reduce_scatter"),
    }
)

WIDEST = (
    frozenset(getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")) | _UNEXPORTED
) - (LOW | FULL | AS_TRACED)


@dataclasses.dataclass(frozen=True)
class Operations:
    """Lists of primitives, by name, that say which dtype each primitive runs in under autocast.

    Attributes:
      low: primitives that run in the policy's `compute_dtype`. Their floating inputs are cast to it.
      full: primitives that run in float32. Their floating inputs are cast to it.
      widest: primitives that run in the widest dtype of their floating inputs. A number written in the program counts
        only if this dtype cannot hold it.

    All other primitives (kernels, callbacks, linear algebra) keep the dtypes of the original program. 64-bit floats,
    integers and keys are never cast. `print` shows the lists.
    """

    low: frozenset[str] = LOW
    full: frozenset[str] = FULL
    widest: frozenset[str] = WIDEST

    def rule(self, primitive: str) -> str:
        """The list of a primitive: "low", "full", "widest", or "as_traced" if it is on no list."""
        if primitive in self.low:
            return "low"
        if primitive in self.full:
            return "full"
        return "widest" if primitive in self.widest else "as_traced"

    def adding(self, *, low: Iterable = (), full: Iterable = (), widest: Iterable = ()) -> "Operations":
        """Copies these lists, with the given primitives moved to the named list from the list that they are on.

        >>> import mpjax
        >>> operations = mpjax.precision.OPERATIONS.adding(low=["tanh"], widest=["square"])
        >>> operations.rule("tanh"), operations.rule("square")
        ('low', 'widest')

        JAX primitives are given by name, primitives of other packages as objects.

        Raises:
          UsageError: a list is a string, or a primitive is given in two lists, is control flow or a call, or has an
            unknown name (the message suggests the nearest names).
        """
        low, full, widest = _names(low), _names(full), _names(widest)
        if twice := (low & full) | (low & widest) | (full & widest):
            raise UsageError(f"primitives in two lists: {', '.join(sorted(twice))}")
        moved = low | full | widest
        return Operations((self.low - moved) | low, (self.full - moved) | full, (self.widest - moved) | widest)

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {', '.join(sorted(names))}"
            for name, names in (("low", self.low), ("float32", self.full), ("widest", self.widest))
        )


def _names(operations: Iterable) -> frozenset[str]:
    if isinstance(operations, str):
        raise UsageError(f"wanted a list of primitives, as in [{operations!r}], got {operations!r}")
    known = LOW | FULL | WIDEST | AS_TRACED
    names = set()
    for operation in operations:
        if isinstance(operation, str) and operation not in known:
            near = difflib.get_close_matches(operation, known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else "; for a whole function use full_precision."
            raise UsageError(f"JAX has no primitive '{operation}'{hint} Pass a primitive of your own as an object")
        names.add(operation if isinstance(operation, str) else operation.name)
    if entered := names & ENTERED:
        raise UsageError(f"control flow and calls have no dtype of their own: {', '.join(sorted(entered))}")
    return frozenset(names)


OPERATIONS = Operations()

SUMS_ALONE = Operations(frozenset(), FULL & ADDING, WIDEST | (FULL - ADDING))
"""Lists for a program that casts by itself: sums run in float32, products in the dtypes of the program."""
