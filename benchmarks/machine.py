"""With what a result was measured: machine, versions, date."""

import datetime
import importlib.metadata
import os
import platform

import jax


def describe(*others: str) -> dict:
    """The machine, and the versions of the packages that every result depends on and of the modules `others`."""
    # A module may come in a package of another name, as tensorflow does in tensorflow-cpu.
    sources = importlib.metadata.packages_distributions()
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", *(sources[module][0] for module in others))
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
