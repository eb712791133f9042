"""environment.json: with what a run was made."""

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from mpjax import strict_json
from mpjax.report.files import write_atomically


PACKAGES = (
    "mpjax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "numpy",
    "orbax-checkpoint",
    "tensorflow-datasets",
    "grain",
)


def write_environment(path: Path, devices: list[str]) -> None:
    """Writes versions, machine, devices, command, date, and the commit if mpjax runs from a git checkout.

    Raises:
      OSError: names the file.
    """
    content: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "devices": devices,
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }
    write_atomically(path, strict_json.encode(content, indent=2).encode() + b"\n")


def process_of(path: Path) -> str:
    """The process that wrote an environment.json, in words; "another process" where that cannot be read."""
    try:
        content = strict_json.decode(path.read_text())
        return f"process {content['process']} on {content['host']}"
    except (OSError, ValueError, KeyError, RecursionError):
        return "another process"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
