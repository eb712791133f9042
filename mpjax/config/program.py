"""What the user types to start a command: `mpjax train`, or `python scripts/train.py`."""

import pathlib
import shlex
import sys


NAME = "mpjax"
"""The program that `pip install` brings."""


def typed(command: str) -> str:
    """Returns a command's name for help and messages: `mpjax train` if this process was started as `mpjax`, else
    `train.py`."""
    return f"{NAME} {command}" if _is_installed_program() else f"{command}.py"


def command_line(command: str, *arguments: str) -> str:
    """Returns a line for the shell that starts a command in the way in which this process was started.

    >>> command_line("diagnose", "--run", "runs/my run")
    "python scripts/diagnose.py --run 'runs/my run'"
    """
    program = pathlib.PurePath(sys.argv[0])
    folder = program.parent if program.parent.name == _SCRIPTS else pathlib.PurePath(_SCRIPTS)
    start = [NAME, command] if _is_installed_program() else ["python", str(folder / f"{command}.py")]
    return shlex.join([*start, *arguments])


_SCRIPTS = "scripts"


def _is_installed_program() -> bool:
    return pathlib.PurePath(sys.argv[0]).stem == NAME
