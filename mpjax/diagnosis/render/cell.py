"""Renders a diagnosis for the output of a notebook's cell: the text and the table, without the plots of the page."""

from mpjax import notebook
from mpjax.diagnosis.facts import Facts
from mpjax.diagnosis.render.text import columns_of, row_texts


_ROWS = 20


def cell_of(found: Facts) -> str:
    """Returns verdict, place, evidence, advice, text to paste and the worst rows as HTML."""
    shown, columns = found.worst[:_ROWS], columns_of(found)
    left_out = len(found.table) - len(shown)
    place = [f"at {found.source}"] if found.source else []
    pasted = "\n\n".join(filter(None, [found.toml, found.repaired_policy]))
    return notebook.block(
        notebook.heading(found.headline),
        notebook.paragraphs([*place, found.evidence, *found.advice]),
        notebook.verbatim(pasted) if pasted else "",
        notebook.table(columns, [row_texts(row, columns) for row in shown]) if shown else "",
        notebook.paragraphs(
            [f"{left_out} rows with less harm are left out; to_html(file) has all."] if left_out else []
        ),
    )
