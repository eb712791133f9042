"""Writes the files of a diagnosis, and formats its messages and the command that repeats it."""

import pathlib

from mpjax.config.program import command_line
from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.files import write_atomically
from mpjax.report.jsonl import read_metrics


NO_DTYPE_REPAIRS = "Look at the learning rate, the data and the parameters: no choice of dtypes repairs this."


def write(diagnosis: Diagnosis, folder: pathlib.Path, name: str) -> pathlib.Path:
    """Writes `diagnosis_<name>.json` and `diagnosis_<name>.html` into a run's folder; returns the path of the page.

    Existing files are replaced. If metrics.jsonl has loss scales, the page shows them over the steps.
    """
    write_atomically(folder / f"diagnosis_{name}.json", f"{diagnosis.to_json()}\n".encode())
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    scales = [(r["step"], r["train/loss_scale"], r["train/skipped"]) for r in records if "train/loss_scale" in r]
    page = folder / f"diagnosis_{name}.html"
    write_atomically(page, diagnosis.to_html(scales=scales).encode())
    return page


def command_for(folder: pathlib.Path, number: int, *flags: str) -> str:
    """Formats the shell command that diagnoses step `number` of a run, with `flags` appended.

    With the flag `--evaluation` it diagnoses the evaluation of checkpoint `number`.
    """
    return command_line("diagnose", "--run", str(folder), "--step", str(number), *flags)


def first_bad_layer(diagnosis: Diagnosis) -> str:
    """Formats a line, with its newline, that names the first bad layer and its direction; empty if there is none.

    If the fault begins outside all modules, the line names the first module with an overflow or non-finite values, or
    says "none by name".
    """
    if diagnosis.direction is None:
        return ""
    rows = [row for row in diagnosis.table if row.direction == diagnosis.direction and row.path]
    after = [row.path for row in rows if row.non_finite or row.overflow]
    path = diagnosis.path or next(iter(after), "none by name")
    return f"first bad layer: {path} ({diagnosis.direction})\n"


def of_the_step_alone(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Formats the verdict and the advice of a diagnosis of one step, for a run that fails for another reason too.

    The result is one text; it is empty unless the repairs of the diagnosis are verified.
    """
    if not diagnosis.verified:
        return ()
    location = "" if diagnosis.path is None else f" in {diagnosis.path or 'no module'} ({diagnosis.direction})"
    return (
        f"This step has a cause of its own besides, {diagnosis.verdict}{location}. "
        f"For that: {' '.join(diagnosis.advice)}",
    )
