"""The command line of a command: `mpjax train`, or `python scripts/train.py`."""

import pathlib
import shlex
import sys


NAME = "mpjax"
"""The program that `pip install` installs."""


def typed(command: str) -> str:
    """The name of a command in help and messages: `mpjax train` if this process started as `mpjax`, else `train.py`."""
    return f"{NAME} {command}" if _is_installed_program() else f"{command}.py"


def command_line(command: str, *arguments: str) -> str:
    """Formats a shell line that starts a command in the same way as this process.

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
