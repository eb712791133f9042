"""Switches off a fusion of XLA's CPU compiler that computes bfloat16 programs wrongly, where jaxlib has it.

jaxlib 0.11 and 0.12 hand a sum and the operations before it to the library YNNPACK. If two of these operations read one
bfloat16 value, such as the input of a residual block, the results are arbitrary: inf, NaN or wrong numbers. Neither
jaxlib 0.10 nor other dtypes have the fault (`tests/test_xla_cpu.py` runs a program that shows it).
"""

import os
import sys
import warnings

from jaxlib.version import __version__ as JAXLIB  # JAX imports it anyway; importlib.metadata takes longer


OPTION = "--xla_cpu_experimental_ynn_fusion_type"

_FIRST, _FIXED = (0, 11), (0, 13)
"""The first version of jaxlib with the fault, and the first one that is not known to have it."""


def keep_sums_right() -> None:
    """Adds the option to `XLA_FLAGS`, which XLA reads when JAX first computes; does nothing if the user has set it.

    Warns:
      PrecisionWarning: JAX has computed on a CPU before, or `XLA_FLAGS` names a file.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if OPTION in flags or not _FIRST <= tuple(map(int, JAXLIB.split(".")[:2])) < _FIXED:
        return
    option = f"{OPTION}=-LIBRARY_FUSION_TYPE_REDUCE"
    names_a_file = bool(flags) and not flags.lstrip().startswith("-")
    if names_a_file or _has_computed_on_cpu():
        from mpjax.errors import PrecisionWarning

        reason = "XLA_FLAGS names a file" if names_a_file else "JAX had computed before mpjax was imported"
        warnings.warn(
            f"jaxlib {JAXLIB} computes some bfloat16 programs wrongly on a CPU, which mpjax could not prevent because "
            f"{reason}; " + (f"add {option} to it" if names_a_file else "import mpjax first"),
            PrecisionWarning,
            stacklevel=3,
        )
        return
    os.environ["XLA_FLAGS"] = f"{flags} {option}".lstrip()


def _has_computed_on_cpu() -> bool:
    if "jax" not in sys.modules:
        return False
    from mpjax.jax_internals import has_computed_on_cpu

    return has_computed_on_cpu()
