"""mpjax: mixed-precision training for JAX and Flax.

Public names are those of `__init__.pyi`, imported on first use. `import mpjax` alone imports neither Flax nor a data
library, but it may add an option to `XLA_FLAGS` (`mpjax/xla_cpu.py`), so import it before JAX computes.
"""

from typing import Any

from mpjax.offers import offer
from mpjax.xla_cpu import keep_sums_right


keep_sums_right()  # before JAX first computes

_offered, __dir__ = offer(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mpjax")
    return _offered(name)
