"""Parses a command line into a dataclass. One `UsageError` reports all mistakes in it."""

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from mpjax.config.program import typed
from mpjax.config.setting_types import out_of_range
from mpjax.errors import UsageError


T = TypeVar("T")
R = TypeVar("R")


def parse(kind: type[T], argv: Sequence[str], *, prog: str, description: str = "") -> T:
    """Parses a command line into an instance of `kind`, whose fields are its flags; absent flags have their defaults.

    Args:
      kind: a dataclass with a docstring.
      argv: the arguments, without the program's name.
      prog: the program's name, for help and messages.
      description: the first lines of the help; empty: the docstring of `kind`.

    Raises:
      UsageError: a flag is unknown or missing, or its value cannot be parsed. The message then has a line for each
        fault, also for values out of range. Values out of range alone are accepted; see `require_valid`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    settings, _, faults = _parsed(kind, argv, prog, description, knows_all=True)
    if settings is None or faults:
        raise _error(faults)
    return settings


def parse_with(kind: type[T], argv: Sequence[str], rest: Callable[[list[str]], R], *, prog: str) -> tuple[T, R]:
    """Parses the flags of `kind` like `parse`, and calls `rest` with all other arguments; returns both results.

    Raises:
      UsageError: as `parse`, and if `rest` raises one; the message has the faults of both.
      SystemExit: code 0 after `--help`.
    """
    settings, unknown, faults = _parsed(kind, argv, prog, "", knows_all=False)
    if settings is None:
        raise _error(faults)
    try:
        others = rest(unknown)
    except UsageError as error:
        raise _error([*faults, str(error)]) from None
    if faults:
        raise _error(faults)
    return settings, others


def _error(faults: Sequence[str]) -> UsageError:
    if len(faults) == 1:
        return UsageError(faults[0])
    # A positional argument may be missing only because `_without` took it for a value of the flag before it.
    lines = [line for fault in faults for line in fault.splitlines() if not line.startswith((" ", "missing from"))]
    return UsageError("\n".join(lines))


def _parsed(
    kind: type[T], argv: Sequence[str], prog: str, description: str, *, knows_all: bool
) -> tuple[T | None, list[str], list[str]]:
    """Parses a command line again and again, each time without the flag of the last fault, to find all faults.

    Returns:
      The settings (None if the rest cannot be parsed either), the unknown arguments, and a message for each fault. With
        `knows_all`, an unknown argument is a fault too.
    """
    about = (description or inspect.cleandoc(kind.__doc__ or "")).replace("train.py", typed("train"))

    def once(argv: Sequence[str], *, knows_all: bool) -> tuple[T, list[str]]:
        with _mistakes_as_usage_errors(prog):
            settings: Any = tyro.cli(
                kind, args=argv, prog=prog, description=about, use_underscores=True, return_unknown_args=not knows_all
            )
        return (settings, []) if knows_all else settings

    faults: list[str] = []
    while True:
        try:
            settings, unknown = once(argv, knows_all=knows_all)
        except UsageError as error:
            faults.append(str(error))
        else:
            return settings, unknown, [*faults, *(out_of_range(settings) if faults else ())]
        # The parser stops at the first fault. Without it, it finds the next one.
        flag = _FLAG.search(faults[-1])
        if faults[-1].startswith("unrecognized"):
            knows_all = False
        elif flag and (fewer := _without(flag[1], argv)) != argv:
            argv = fewer
        else:
            return None, [], faults


_FLAG = re.compile(r"(?:^|for argument ')(--[\w.]+)")
"""The flag that a message of the parser is about."""


def _without(flag: str, argv: Sequence[str]) -> Sequence[str]:
    """Removes each occurrence of a flag, spelled with `_` or `-`, and the words up to the next `--` flag."""
    kept, drops = [], False
    for word in argv:
        if word.startswith("--"):
            drops = "--" + word.partition("=")[0].removeprefix("--").replace("-", "_") == flag
        if not drops:
            kept.append(word)
    return kept


@contextlib.contextmanager
def _mistakes_as_usage_errors(prog: str):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as error:
        if not error.code:
            raise
        raise UsageError(message_of(printed.getvalue(), prog)) from None


def message_of(box: str, prog: str) -> str:
    """Extracts the parser's message from its printed box.

    Args:
      box: the printed text of the parser: a title, and sections between lines.
      prog: the program's name.

    Returns:
      The first section on one line, with the flags that the parser suggests; then its other sections, indented, one
        line each. If there is no section, the whole text.
    """
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        # Where stdout is not UTF-8, the box has no sides.
        inner = re.fullmatch(r"[│|] ?(.*?) *[│|]|  (.*?) *", line)
        text = inner and (inner[1] if inner[2] is None else inner[2])
        if text is None or re.fullmatch(r"[─-]+", text):  # a border, with or without a title, or a line between
            sections.append([])
        elif text.strip():
            sections[-1].append(text.rstrip())
    filled = [section for section in sections if section]
    if not filled:
        return box.strip() or f"wrong arguments; {prog} --help lists all"
    first, *others = [section for section in filled if not section[0].startswith("For full helptext")] or [[]]
    message = " ".join(line.strip() for line in first)
    message = message[:1].lower() + message[1:]
    message = message.removeprefix("error parsing ")
    message = re.sub(r"'\('(--[^']+)',\)'", r"'\1'", message)  # tyro 1.0.0 prints a tuple
    offered = [line.split()[0] for section in others for line in section if re.match(r" *--", line)]
    asks = f"; did you mean {', '.join(offered)}?" if offered and message.startswith("unrecognized") else ""
    detail = "".join(f"\n  {line}" for section in others for line in section)
    return f"{message}{asks} ({prog} --help lists all){detail}"
