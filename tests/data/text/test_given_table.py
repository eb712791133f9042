"""Tables that a user gives: their names, their quotes, and what is no text."""

import csv

import pytest

from mpjax.data.text import Template, texts_of_table
from mpjax.errors import DataWarning, UsageError


HEADER = ("label", "text")


def column(content, *, name="text", delimiter="\t", header=()):
    return list(texts_of_table("a", content.encode(), Template.alone(name), delimiter=delimiter, header=header))


def test_a_first_line_of_names_is_no_text():
    assert column("label\ttext\n0\tbad\n1\tfine\n") == [("a:2", "bad"), ("a:3", "fine")]


def test_without_names_every_line_is_a_text_in_the_order_of_the_runs_header():
    assert column("0\tbad\n1\tfine\n", header=HEADER) == [("a:1", "bad"), ("a:2", "fine")]
    assert column("0\ttext\n", header=HEADER) == [("a:1", "text")]  # no line of names: `label` is not in it


@pytest.mark.parametrize("header", [HEADER, ("Label", "Text"), (" LABEL", "TEXT ")])
@pytest.mark.parametrize("names", ["label\ttext", "Text\tLABEL", "text", "text\tsource\tid", " Text \tdate\tid"])
def test_a_table_with_names_is_read_by_them_also_in_a_run_whose_own_has_none(names, header):
    columns = names.split("\t")
    name = next(name for name in columns if name.strip().lower() == "text")
    row = "\t".join("x" if other == name else "0" for other in columns)
    assert column(f"{names}\n{row}\n", name=name, header=header) == [("a:2", "x")]


def test_a_column_that_the_runs_header_has_not_is_an_error_that_shows_the_first_line():
    said = (
        "no column 'body'; it has label, text, as --data.header of the run has it, and its first line is 0,bad; write"
    )
    with pytest.raises(UsageError, match=said):
        column("0\tbad\n", name="body", header=HEADER)


def test_an_example_is_not_taken_for_names():
    """Following the names that an error lists would drop a row without a word."""
    with pytest.raises(
        UsageError, match="is 0,bad film, which looks like an example: '0' is a number; write a line of"
    ):
        column("0\tbad film\n1\tfine\n", name="bad film")
    with pytest.raises(UsageError, match="looks like an example: 'neg' is also a value in its column; write a line"):
        column("neg\tbad film\nneg\tdull\npos\tfine\nneg\tweak\n", name="bad film")


def test_a_row_of_another_length_is_an_error_of_its_own():
    (_, fine), (where, error) = column("0\tbad\n1\n", header=HEADER)
    assert (fine, where) == ("bad", "a:2")
    assert str(error) == "a:2: 1 values in 2 columns; wanted one for each"


@pytest.mark.parametrize("blank", ["", "  ", " \t"])
def test_blank_lines_of_a_table_are_no_rows(blank):
    assert column(f"{blank}\nlabel,text\n{blank}\n0,bad\n\n1,\n", delimiter=",") == [("a:4", "bad"), ("a:6", "")]
    assert column(f'text\n{blank}\n"  "\n""\n', delimiter=",") == [("a:3", "  "), ("a:4", "")]


@pytest.mark.parametrize("end", ['now"', "now"])
def test_quotes_that_would_join_lines_of_a_tsv_are_characters(end):
    content = f'0\t"he said\n1\tbye {end}\n0\t"a" b\n'
    with pytest.warns(DataWarning, match="a: quotes of the tsv file are read as characters"):
        found = column(content, header=HEADER)
    assert [text for _, text in found] == ['"he said', f"bye {end}", '"a" b']


def test_pairs_of_quotes_are_quotes():
    assert column('label\ttext\n0\t"a\tb"\n1\t"c\nd"\n') == [("a:2", "a\tb"), ("a:3", "c\nd")]
    assert column('text\n"a,\nb"\nc\n', delimiter=",") == [("a:2", "a,\nb"), ("a:4", "c")]


def test_an_open_quote_of_a_csv_is_an_error_that_names_its_line():
    with pytest.raises(UsageError, match="a:3: a quote is not closed up to the end of the file"):
        column('text\nok\n"he said\nbye\n', delimiter=",")


def test_a_text_may_be_longer_than_python_takes_by_default():
    before = csv.field_size_limit()
    ((_, text),) = column("text\n" + "x" * (before + 1) + "\n")
    assert len(text) == before + 1
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(("content", "said"), [("", "it has nothing"), ("text\n", "no rows below the names")])
def test_an_empty_table_is_an_error(content, said):
    with pytest.raises(UsageError, match=said):
        column(content)


@pytest.mark.extra
@pytest.mark.parametrize(
    "content",
    [
        '0\t"he said\n1\tbye" now\n0\tx\n1\ty\n',
        '0\t"he said\n1\tbye\n0\tx\n1\ty\n',
        '0\t"a\tb"\n1\t"c\nd"\n0\tx\n1\ty\n',
        '0\t"a""b"\n1\tc "d" e\n0\tx\n1\t"y"z\n',
        "0\ta\n\n1\tb\n  \n0\t\n\t\n",
    ],
)
@pytest.mark.filterwarnings("ignore:quotes of the tsv", "ignore:a. quotes of the tsv")
def test_texts_are_those_that_training_reads(tmp_path, content):
    pytest.importorskip("datasets", reason="pip install 'mpjax[hf]'")
    from mpjax.data.sources import load_splits

    (tmp_path / "a.tsv").write_text(content)
    trained = load_splits(str(tmp_path / "a.tsv"), HEADER)["train"]["text"][:]
    assert [text for _, text in column(content, header=HEADER)] == trained
