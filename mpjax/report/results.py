"""Builds the contents of environment.json and summary.json, and formats the table at the end of a run."""

import datetime
import importlib.metadata
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpjax import strict_json
from mpjax.config.choices import BEST
from mpjax.config.score import ACCURACY, Score
from mpjax.errors import printable
from mpjax.files import write_atomically
from mpjax.report.jsonl import Records
from mpjax.report.wording import count, duration, number, rate


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


def environment(devices: list[str], compiler_options: Mapping[str, Any]) -> dict[str, Any]:
    """Collects versions, machine, devices, command, date and commit, as the content of environment.json.

    The version of a package that is not installed is None. `commit` is None if mpjax does not run from a git checkout.
    The date is in UTC.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "devices": devices,
        "compiler_options": dict(compiler_options),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def process_of(path: Path) -> str:
    """Describes the process that wrote an environment.json: "process 12 on HOST", or "another process".

    It is "another process" if the file is unreadable or damaged, or its process ran on this host and has ended. Until
    the first step of a resumed run, the file is still from the previous process.
    """
    try:
        content = strict_json.decode(path.read_text(encoding="utf-8"))
        process, host = content["process"], content["host"]
    except (OSError, ValueError, KeyError, RecursionError):
        return "another process"
    # A float or a bool is no process id. os.kill takes ids of 0 and below as groups of processes.
    if type(process) is not int or process <= 0 or not isinstance(host, str):
        return "another process"
    return f"process {process} on {host}" if host != socket.gethostname() or _lives(process) else "another process"


def _lives(process: int) -> bool:
    """True if a process with this id runs on this machine, also one of another user."""
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except PermissionError:  # the process belongs to another user
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The git commit that mpjax runs from, with "-dirty" if files are changed; None outside of a git checkout."""
    # The repository of this package, and not one around the environment that it is installed in.
    checkout = str(Path(__file__).parents[2])
    command = ["git", "-C", checkout, "--git-dir", ".git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def summarise(
    records: Records,
    *,
    steps: int,
    attempts: int,
    skipped: int,
    seconds: float,
    compile_seconds: float,
    examples_per_second: float,
    policy: str,
    parameters: int,
    score: Score = ACCURACY,
    best_step: int | None = None,
    **more: str | float,
) -> dict[str, Any]:
    """Builds the content of `summary.json`.

    Args:
      records: the result of `read_metrics`.
      steps: the number of steps that updated the parameters.
      attempts: the number of attempted steps, skipped steps included.
      skipped: the number of steps that were skipped because gradients were not finite.
      seconds: the total wall-clock time of the run, in seconds.
      compile_seconds: the seconds spent compiling before the first step, which `seconds` includes.
      examples_per_second: the training throughput without compilation and evaluation.
      policy: a description of the precision policy.
      parameters: the number of trainable values in the model.
      score: the test metric that chooses the best checkpoint.
      best_step: the step of the best checkpoint; None if there is none.
      **more: further entries, stored unchanged.

    Returns:
      The last value of each training and evaluation metric under its own name (but `train/skipped` and
      `train/examples_per_second`), the other arguments, and, if the best checkpoint has a finite `score`, that value
      as `best/test/<metric>` with its step as `best/step`.
    """
    final = {
        name: value
        for record in records
        for name, value in record.items()
        if name.startswith(("train/", "test/", "ema/")) and name not in _NOT_FINAL
    }
    return {
        **final,
        **_best(records, f"test/{score.metric}", best_step),
        "steps": steps,
        "attempts": attempts,
        "skipped": skipped,
        "seconds": seconds,
        "compile_seconds": compile_seconds,
        "examples_per_second": examples_per_second,
        "policy": policy,
        "parameters": parameters,
        **more,
    }


# `skipped` and `examples_per_second` of the summary cover the whole run.
_NOT_FINAL = ("train/skipped", "train/examples_per_second")


def throughput(records: Records) -> float:
    """The training throughput in examples per second: the median over the reports; NaN without reports.

    >>> throughput([{"train/examples_per_second": rate} for rate in (20.0, 950.0, 1000.0)])
    950.0
    """
    rates = [record["train/examples_per_second"] for record in records if "train/examples_per_second" in record]
    return statistics.median(rates) if rates else math.nan


def as_file(content: Mapping[str, Any]) -> bytes:
    """Encodes the content of environment.json or summary.json as indented JSON, in UTF-8."""
    return strict_json.encode(content, indent=2).encode() + b"\n"


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Writes `summary` as JSON to `path`, atomically. An existing file is replaced.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    write_atomically(Path(path), as_file(summary))


def summary_of(path: Path, ran: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads a summary.json if it is the summary of the run that `ran` describes.

    Returns None if the file cannot be read, or if any entry of `ran` is missing in it or differs.
    """
    try:
        summary = strict_json.decode(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return summary if all(summary.get(name) == value for name, value in ran.items()) else None


def summary_table(summary: Mapping[str, Any]) -> str:
    """Formats the result of `summarise` as aligned lines of a label and a text. Control characters are escaped."""
    rows = [
        ("policy", summary["policy"]),
        ("parameters", f"{summary['parameters']:,}"),
        ("steps", f"{summary['steps']} of {summary['attempts']} applied, {summary['skipped']} skipped"),
        ("time", f"{duration(summary['seconds'])}, of which {duration(summary['compile_seconds'])} compiling"),
        ("throughput", f"{rate(summary['examples_per_second'])} examples/s"),
    ]
    if "train/loss_scale" in summary:
        rows.append(("loss scale", count(summary["train/loss_scale"])))
    rows += [
        (name.replace("/", " "), _with_best(name, summary))
        for group in ("train", "test", "ema")
        for name in summary
        if name.startswith(f"{group}/") and (group != "train" or name.partition("/")[2] in BEST)
    ]
    rows += [(f"from step {int(step):,}", text) for step, text in summary.get("changed", {}).items()]
    rows += [("metrics", f"lines of steps {gap} are lost") for gap in summary.get("metrics_missing", [])]
    if "output_dir" in summary:
        rows.append(("folder", str(summary["output_dir"])))
    width = max(len(label) for label, _ in rows)
    return printable("\n".join(f"{label:<{width}}  {text}" for label, text in rows))


def _best(records: Records, name: str, step: int | None) -> dict[str, float]:
    """The entries `best/<name>` and `best/step` of the summary; empty if the metric is not finite at `step`."""
    values = [record[name] for record in records if record["step"] == step and name in record]
    return {f"best/{name}": values[-1], "best/step": step} if step and values and math.isfinite(values[-1]) else {}


def _with_best(name: str, summary: Mapping[str, Any]) -> str:
    """Formats a metric of the summary, with its best value and step if the summary has them."""
    best = summary.get(f"best/{name}")
    aside = "" if best is None else f"  (best {number(best)} at step {summary['best/step']})"
    return number(summary[name]) + aside
