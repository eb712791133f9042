"""What a notebook needs: HTML of headings, tables and texts, and its shell, if mpjax runs in one."""

import html
import sys
from collections.abc import Iterable, Sequence
from typing import Any


_CELL = ' style="text-align: left; vertical-align: top; padding: 2px 14px 2px 0"'


def running_shell() -> Any:
    """Returns the IPython shell that mpjax runs in; None outside of one. IPython is not imported for it."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def file_or_cell(file: str) -> str:
    """Returns the path of a source file, or `Cell In[3]` for the file that stands for a cell of this notebook."""
    name_of = getattr(getattr(running_shell(), "compile", None), "format_code_name", lambda file: None)
    return " ".join(name_of(file) or (file,))


def as_text(value: Any, printer: Any, cycle: bool) -> None:
    """Shows a value as `print` does: the `_repr_pretty_` of a class, which IPython calls where it shows no HTML."""
    printer.text(str(value))


def block(*parts: str) -> str:
    """Returns the HTML of an output, from the HTML of its parts."""
    return f"<div>{''.join(parts)}</div>"


def heading(text: str) -> str:
    """Returns a line in bold."""
    return f"<p><b>{html.escape(text)}</b></p>"


def paragraphs(lines: Iterable[str]) -> str:
    """Returns a paragraph for each line."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def verbatim(text: str) -> str:
    """Returns text to copy, with its line breaks."""
    return f"<pre>{html.escape(text)}</pre>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, which scrolls if it is long.

    >>> table(["path"], [["a<b"]]).count("a&lt;b")
    1
    """
    head = "".join(f"<th{_CELL}>{html.escape(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td{_CELL}>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        '<div style="max-height: 32em; overflow: auto">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
