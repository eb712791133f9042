"""The commands of `mpjax`. Each takes arguments, returns an exit code, and prints user errors without a traceback.

`mpjax train --help` and `python scripts/train.py --help` run the same function. Imports are late: help and errors about
flags appear before JAX is imported.
"""

import functools
import importlib
import logging
import select
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpjax.ctrl_c import ended_by_interrupts
from mpjax.errors import (
    CallbackError,
    Diverged,
    Interrupted,
    UsageError,
    exit_code_of,
    failure,
    printable,
    show_warning,
)


class Command(NamedTuple):
    """A command. Its function and dataclasses are named as `module:name` and imported when it runs.

    Attributes:
      about: the purpose of the command, in one line.
      run: the function that does the work, called with an instance of each dataclass.
      settings: the dataclasses that define the flags.
    """

    about: str
    run: str
    settings: tuple[str, ...]


NAME = "mpjax"
_CONFIG = "mpjax.config.schema:Config"

COMMANDS = {
    "train": Command(
        "train a model in mixed precision, or resume a run",
        "mpjax.commands.launch:start_training",
        (_CONFIG,),
    ),
    "evaluate": Command(
        "evaluate a checkpoint of a run, under any precision policy",
        "mpjax.commands.evaluate:evaluate_run",
        ("mpjax.config.commands:Evaluation",),
    ),
    "predict": Command(
        "predict classes, masks or losses of images and texts with a checkpoint",
        "mpjax.commands.predict:predict_run",
        ("mpjax.config.commands:Prediction",),
    ),
    "diagnose": Command(
        "find out whether precision is at fault, where, and what repairs it",
        "mpjax.commands.diagnose:diagnose_run",
        ("mpjax.config.commands:Diagnose",),
    ),
    "plan": Command(
        "predict memory and speed of a run on a GPU that is not here",
        "mpjax.commands.plan:plan_run",
        ("mpjax.config.plan:Plan", _CONFIG),
    ),
    "find_lr": Command(
        "find a learning rate: a few updates at growing rates",
        "mpjax.commands.find_lr:find_rate",
        ("mpjax.config.commands:RateSearch", _CONFIG),
    ),
    "compare": Command(
        "find where the training curves of runs diverge",
        "mpjax.commands.compare:compare_runs",
        ("mpjax.config.commands:Compare",),
    ),
    "export": Command(
        "write the weights of a checkpoint as safetensors",
        "mpjax.commands.export:export_run",
        ("mpjax.config.commands:Export",),
    ),
    "train_ray": Command(
        "train on a Ray cluster",
        "mpjax.commands.train_ray:train_on_ray",
        ("mpjax.config.commands:OnRay", _CONFIG),
    ),
}
"""All commands, by the name that the user types, in the order of `mpjax --help`."""


def settings_of(name: str, argv: Sequence[str]) -> tuple[Any, ...]:
    """Parses the arguments of the command `name` into an instance of each dataclass in its `settings`, in their order.

    Args:
      name: a key of `COMMANDS`.
      argv: the arguments after the name of the command.

    Raises:
      UsageError: a flag or a value is wrong; see `mpjax.config.load.load_settings`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    from mpjax.config.load import load_settings
    from mpjax.config.program import typed

    return load_settings([imported(kind) for kind in COMMANDS[name].settings], argv, prog=typed(name))


def call(name: str, argv: Sequence[str]) -> int:
    """Runs the command `name`, a key of `COMMANDS`, with the arguments `argv`, and returns its exit code.

    Errors become messages on stderr and exit codes, as in `exit_code`. If the user's code or a library calls `sys.exit`
    while the command works, that is a CallbackError, with exit code 1. The return value of the command is dropped.
    """

    def read_and_run() -> None:
        settings = settings_of(name, argv)
        imported("mpjax.commands.host_memory:keep_freed_memory")()
        try:
            imported(COMMANDS[name].run)(*settings)
        except SystemExit as error:  # not from --help, which was handled before: the user's code or a library exits
            raise CallbackError(
                f"the command ended before it was done: {failure(error)}; raise an exception instead, or let a "
                'callback return "stop"'
            ) from error

    return exit_code(read_and_run)


train, evaluate, predict, diagnose, plan, find_lr, compare, export, train_ray = (
    functools.partial(call, name)
    for name in ("train", "evaluate", "predict", "diagnose", "plan", "find_lr", "compare", "export", "train_ray")
)


def main() -> int:
    """Runs the program `mpjax` on `sys.argv[1:]` and returns its exit code; without arguments, it prints the help."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        return call(name, argv)
    return exit_code(functools.partial(_answer, name.replace("_", "-"), argv))


def _answer(option: str, argv: Sequence[str]) -> None:
    """Runs an option of the program itself: prints the help, the version, or the completions of the shell `argv[0]`.

    Raises:
      UsageError: there is no such option or command (the message suggests a similar one, if any), or the shell is
        missing or unknown.
    """
    match option:
        case "-h" | "--help":
            print(_help())
        case "--version":
            from importlib.metadata import version

            print(f"{NAME} {version(NAME)}")
        case "--print-completion":
            from mpjax.config.completion import script

            settings = {name: [imported(kind) for kind in command.settings] for name, command in COMMANDS.items()}
            print(script(argv[0] if argv else "", settings))
        case _:
            import difflib

            kind = "option" if option.startswith("-") else "command"
            known = [*_OPTIONS, *COMMANDS]
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"no {kind} '{option}'{hint} ({NAME} --help lists all)")


_OPTIONS = {
    "--help": "show this text; with a command before it, all flags of that command",
    "--version": "show the version",
    "--print-completion": 'print what lets bash complete commands and flags: eval "$(mpjax --print-completion bash)"',
}


def _help() -> str:
    rows = [(name, command.about) for name, command in COMMANDS.items()]
    width = max(len(name) for name in (*COMMANDS, *_OPTIONS)) + 2
    lines = [f"  {name:<{width}}{about}" for name, about in (*rows, ("", ""), *_OPTIONS.items())]
    return "\n".join([f"usage: {NAME} COMMAND ...", "", *(line.rstrip() for line in lines)])


def imported(reference: str) -> Any:
    """Imports the module of `module:name` and returns its attribute `name`."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code. Errors that are no bugs are printed to stderr, without a traceback.

    These are UsageError, Diverged, Interrupted, CallbackError, KeyboardInterrupt and OSError. Other exceptions pass. If
    the reader of stdout has closed the pipe, nothing is printed, and `sys.stdout` becomes None. SIGINT ends the command
    even inside XLA (`ended_by_interrupts`). Two changes remain afterwards: warnings are shown by `show_warning`, and
    absl logs errors only.

    Returns:
      0: done; 1: system or callback error, or a closed stdout; 2: usage error; 3: diverged; 128 + signal number:
        interrupted. After a SystemExit, its own code if that is a number, else 2.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.showwarning = show_warning
    try:
        with ended_by_interrupts():
            _run(command)
    except SystemExit as error:  # after --help
        return error.code if isinstance(error.code, int) else 2
    except (UsageError, Diverged, Interrupted, CallbackError) as error:
        return _fail(error, exit_code_of(error))
    except KeyboardInterrupt as error:
        return _fail("interrupted", exit_code_of(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            sys.stdout = None
            return 1
        return _fail(error, 1)
    return 0


def _run(command: Callable[[], None]) -> None:
    """Runs a command, then flushes stdout, also after a SystemExit, so that a failed write raises its OSError here.

    Python's own flush at exit would come too late to change the exit code.
    """
    try:
        command()
    except SystemExit:
        print(end="", flush=True)
        raise
    print(end="", flush=True)


def _has_no_reader(stream: Any) -> bool:
    """True if a stream is a pipe whose reader has closed it; False for anything else, such as a file or None."""
    poll = select.poll()
    try:
        poll.register(stream, select.POLLOUT)
    except (AttributeError, OSError, TypeError, ValueError):  # a stream without a descriptor, as in a notebook
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _fail(error: object, code: int) -> int:
    print(printable(f"error: {error}" if code < 128 else error), file=sys.stderr)
    return code
