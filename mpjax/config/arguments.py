"""Parses a command line into a dataclass; a mistake is one `UsageError`, with the whole message in its first line."""

import contextlib
import inspect
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from mpjax.config.program import typed
from mpjax.errors import UsageError


T = TypeVar("T")


def parse(kind: type[T], argv: Sequence[str], *, prog: str, description: str = "") -> T:
    """Parses a command line.

    Args:
      kind: a dataclass with a docstring.
      argv: the arguments, without the program's name.
      prog: the program's name, for help and messages.
      description: the first lines of the help; empty: the docstring of `kind`.

    Raises:
      UsageError: a flag is unknown, missing or has a wrong value.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    with _mistakes_as_usage_errors(prog):
        return tyro.cli(kind, args=list(argv), prog=prog, description=_about(kind, description), use_underscores=True)


def parse_known(kind: type[T], argv: Sequence[str], *, prog: str) -> tuple[T, list[str]]:
    """Parses the flags of `kind` like `parse`, and also returns all other arguments."""
    with _mistakes_as_usage_errors(prog):
        return tyro.cli(
            kind,
            args=list(argv),
            prog=prog,
            description=_about(kind, ""),
            use_underscores=True,
            return_unknown_args=True,
        )


def _about(kind: type, description: str) -> str:
    return (description or inspect.cleandoc(kind.__doc__ or "")).replace("train.py", typed("train"))


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
      The first section on one line, with the flags that the parser suggests, then its other sections, indented.
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
