"""Joins several columns of text to one by a template, such as `{premise} [SEP] {hypothesis}`."""

import dataclasses
import difflib
import string
from collections.abc import Mapping, Sequence

from mpjax.data.examples import Example, Examples, MappedExamples
from mpjax.data.table import Table, Text
from mpjax.errors import UsageError


FLAG = "--data.text_template"


@dataclasses.dataclass(frozen=True)
class Template:
    """A text with gaps, each of which is filled by a column.

    Args:
      columns: the name of the column of each gap, in order; one may come twice.
      between: the text before each gap and after the last, one more than gaps.
    """

    columns: tuple[str, ...]
    between: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parses a template in which `{NAME}` is a gap, and `{{` and `}}` are braces.

        What stands between braces is the name of a column, character by character. So a template reaches nothing but
        texts: it has no attributes, indices, conversions or formats, as `str.format` has.

        Raises:
          UsageError: a brace stands alone, a gap has no name, a conversion or a format, or there is no gap.
        """
        columns, between = [], [""]
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UsageError(
                f"{FLAG} '{text}': {error}; wanted a name of a column in braces, as in {{premise}}; for a brace itself "
                "write {{ or }}"
            ) from error
        for literal, name, form, conversion in parts:
            between[-1] += literal
            if name is None:
                continue
            if not name or form or conversion:
                written = f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
                raise UsageError(
                    f"{FLAG} '{text}': {{{written}}} is not the name of a column alone, as in {{premise}}; for a brace "
                    "itself write {{ or }}"
                )
            columns.append(name)
            between.append("")
        if not columns:
            raise UsageError(f"{FLAG} '{text}' names no column; write one in braces, as in {{premise}}")
        return cls(tuple(columns), tuple(between))

    @classmethod
    def alone(cls, column: str) -> "Template":
        """Builds the template of one column and no other text."""
        return cls((column,), ("", ""))

    def filled(self, values: Mapping[str, str | bytes], where: str) -> str:
        """Fills each gap with the text of its column; braces in these texts have no meaning.

        Args:
          values: the texts by column, str or UTF-8 bytes; other entries are not used.
          where: the origin of the texts, for messages.

        Raises:
          UsageError: a value is no text.
        """
        first, *others = self.between
        texts = (_decoded(values[column], column, where) for column in self.columns)
        return first + "".join(text + after for text, after in zip(texts, others, strict=True))


def _decoded(value: str | bytes, column: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise UsageError(f"{where}: column '{column}': got {type(value).__name__}; wanted str or UTF-8 bytes")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: column '{column}': not UTF-8: {error}; convert the data to UTF-8") from error


def require_columns(template: Template, names: Sequence[str], where: str) -> None:
    """Raises UsageError if a column of the template is not among `names`; the message has the nearest name."""
    for column in template.columns:
        if column not in names:
            near = difflib.get_close_matches(column, names, n=1)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            raise UsageError(f"{FLAG}: {where} has no column '{column}'; it has {', '.join(names)}{hint}")


def with_joined_text(table: Table, text: str) -> Table:
    """Adds a column of text to a table, made of other columns by the template `text`, which is also its name.

    The column is the text of every task. It is joined when an example is read.

    Raises:
      UsageError: the template is invalid, or a column in it does not exist or is not text. When columns are opened: one
        of them is in the template too, so that the text would hold the label.
    """
    template = Template.parse(text)
    require_columns(template, list(table.columns), f"data set '{table.name}'")
    for column in template.columns:
        if not isinstance(table.columns[column], Text):
            raise UsageError(
                f"{FLAG}: column '{column}' of '{table.name}' is {table.columns[column]}; wanted columns of text"
            )
    return _joined(table, template, text)


def _joined(table: Table, template: Template, text: str) -> Table:
    def fill(example: Example) -> Example:
        return {**example, text: template.filled(example, f"'{table.name}'")}

    def open_columns(names: Sequence[str]) -> tuple[Examples, Examples]:
        if text not in names:
            return table.open(names)
        others = [name for name in names if name != text]
        if held := [name for name in others if name in template.columns]:
            raise UsageError(
                f"{FLAG} '{text}': column '{held[0]}' is predicted, and the text would tell it; leave it out of the "
                "template, or predict another column"
            )
        train, test = table.open((*others, *dict.fromkeys(template.columns)))
        return MappedExamples(train, fill), MappedExamples(test, fill)

    inner = table.labelled
    labelled = (lambda column: _joined(inner(column), template, text)) if inner else None
    return Table(table.name, {**table.columns, text: Text()}, open_columns, {**table.preferred, "text": text}, labelled)
