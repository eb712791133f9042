"""How the user starts a command: `mpjax train`, or `python scripts/train.py`, for help, messages and advice."""

import pathlib
import shlex
import sys


NAME = "mpjax"
"""The name of the program that `pip install` installs."""


def typed(command: str) -> str:
    """The name of a command in help and messages: `mpjax train` if this process started as `mpjax`, else `train.py`."""
    return f"{NAME} {command}" if _is_installed_program() else f"{command}.py"


def command_line(command: str, *arguments: str) -> str:
    """Formats a shell line, quoted where needed, that starts a command as this process was started.

    After `mpjax`, that is `mpjax COMMAND ...`; otherwise the script of the command, in the folder `scripts` of the path
    with which this process was started, else in `scripts`.

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
