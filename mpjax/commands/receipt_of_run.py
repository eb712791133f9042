"""Writes the receipt of a run, the dtypes in which its compiled step computes; enforces `--precision.strict`."""

import pathlib
from collections.abc import Callable, Mapping

from mpjax.commands.build import Run
from mpjax.errors import DtypeError, UsageError
from mpjax.plan.receipt import receipt_of
from mpjax.training.feed import CallProgram


RECEIPT_FILE = "receipt.json"

Programs = Mapping[int, CallProgram]
"""The compiled training call of each number of steps per call."""


def check_receipt(
    run: Run, programs: Programs, folder: pathlib.Path, put: Callable[[pathlib.Path, bytes], object]
) -> str:
    """Reads which dtypes the compiled training call uses, passes this receipt to `put`, and returns a message.

    Of several programs, it reads the one with the most steps per call. If that cannot be read, nothing is written, and
    the message says so.

    Args:
      run: the run.
      programs: the compiled training calls, at least one.
      folder: the run's folder.
      put: called as `put(folder / RECEIPT_FILE, content)` to write the receipt.

    Raises:
      DtypeError: with `precision.strict`, an operation runs in another dtype than asked for, although this device could
        run it as asked. The receipt is passed to `put` before.
      UsageError: with `precision.strict`, the program cannot be read.
    """
    strict = run.config.precision.strict
    jaxpr, _, executable = programs[max(programs)]
    try:
        receipt = receipt_of(
            executable,
            jaxpr,
            run.plan.policy,
            modules={"": run.task.abstract},
            updates=run.plan.least_update,
        )
    except Exception as error:  # a run goes on if the text of another XLA cannot be parsed
        if strict:
            raise UsageError(
                f"--precision.strict: this program cannot be read ({type(error).__name__}: {error}); write "
                "--precision.no_strict to train without knowing what runs"
            ) from error
        return f"{RECEIPT_FILE} is not written: this program cannot be read ({type(error).__name__}: {error})"
    put(folder / RECEIPT_FILE, receipt.to_json().encode() + b"\n")
    if strict:
        try:
            receipt.require(device_limits=False)
        except DtypeError as error:
            raise DtypeError(
                f"--precision.strict: {error}\nwrite a rule for what is to run otherwise, such as --precision.rules "
                '"PATH" float32, or --precision.no_strict to train all the same'
            ) from error
    if strict and any(row.device_limit for row in receipt):
        return f"{receipt.line}; --precision.strict accepts that, as no program for this device could do otherwise"
    more = "" if all(row.verdict == "as asked" or row.device_limit for row in receipt) else f"; see {RECEIPT_FILE}"
    return f"{receipt.line}{more}"
