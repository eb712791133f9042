"""Shows results in notebooks: finds the running IPython shell, and formats headings, tables and texts as HTML."""

import html
import sys
from collections.abc import Iterable, Sequence
from typing import Any


_CELL = ' style="text-align: left; vertical-align: top; padding: 2px 14px 2px 0"'


def running_shell() -> Any:
    """The IPython shell that mpjax runs in; None outside IPython. It never imports IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def file_or_cell(file: str) -> str:
    """Returns `Cell In[3]` for the temporary source file of a cell in this notebook, and any other path unchanged."""
    name_of = getattr(getattr(running_shell(), "compile", None), "format_code_name", lambda file: None)
    return " ".join(name_of(file) or (file,))


def as_text(value: Any, printer: Any, cycle: bool) -> None:
    """Shows `str(value)` in IPython: a class assigns this function to `_repr_pretty_`, which is used without HTML."""
    printer.text(str(value))


def block(*parts: str) -> str:
    """Joins HTML strings, which are not escaped, into one `div`."""
    return f"<div>{''.join(parts)}</div>"


def heading(text: str) -> str:
    """Formats text as HTML: a bold line."""
    return f"<p><b>{html.escape(text)}</b></p>"


def paragraphs(lines: Iterable[str]) -> str:
    """Formats each line as an HTML paragraph."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def verbatim(text: str) -> str:
    """Formats text as an HTML `pre` element, which keeps its line breaks."""
    return f"<pre>{html.escape(text)}</pre>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats column heads and rows of cells, all text to escape, as an HTML table that scrolls if it is long.

    >>> table(["path"], [["a<b"]]).count("a&lt;b")
    1
    """
    head = "".join(f"<th{_CELL}>{html.escape(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td{_CELL}>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        '<div style="max-height: 32em; overflow: auto">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
