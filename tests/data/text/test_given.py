"""Texts of files, tables and stdin, tokenized as those of a set."""

import dataclasses
import io
from types import SimpleNamespace

import pytest

from mpjax.config import Data
from mpjax.data import Label, Length, Source, Tokens
from mpjax.data.text import Template, given_texts, require_tables
from mpjax.errors import DataWarning, UsageError


CLASSES = Source("set", {"tokens": Tokens(4, 259), "length": Length(4), "label": Label(2)}, train=[], test=[])
NEXT = Source("set", {"tokens": Tokens(5, 259)}, train=[], test=[])
CONFIG = Data(tokenizer="bytes")


def read(inputs, source=CLASSES, column="text", config=CONFIG):
    given = given_texts(inputs, source, config, columns=Template.alone(column))
    return {
        name: given.to_arrays(stored)
        for name, stored in zip(given.names, given.load(range(len(given.names))), strict=True)
    }


def test_each_line_is_a_text_also_an_empty_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\r\n\nabcdef\n")
    with pytest.warns(DataWarning, match="texts of more than 4 tokens are cut to them, as in training"):
        found = read([f"{tmp_path}/a.txt"])
    assert list(found) == [f"{tmp_path}/a.txt:{line}" for line in (1, 2, 3)]
    lengths = [int(rows["length"][0]) for rows in found.values()]
    ab = next(iter(found.values()))["tokens"]
    assert (lengths[1], lengths[2], ab.shape) == (lengths[1], 4, (1, 4))
    assert ord("a") + 3 in ab
    assert ord("\r") + 3 not in ab


def test_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"x\ny")))
    assert list(read(["-"])) == ["stdin:1", "stdin:2"]


def test_a_column_of_a_table_with_lines_inside_values(tmp_path):
    (tmp_path / "a.csv").write_text('id,said\n1,"a\nb"\n2,c\n')
    source = dataclasses.replace(CLASSES, fields={**CLASSES.fields, "tokens": Tokens(5, 259), "length": Length(5)})
    found = read([f"{tmp_path}/a.csv"], source, column="said")
    assert [name.rpartition(":")[2] for name in found] == ["2", "4"]
    assert ord("\n") + 3 in next(iter(found.values()))["tokens"]


def test_a_table_without_names_is_read_by_those_of_the_run(tmp_path):
    (tmp_path / "a.tsv").write_text("0\tab\n1\tcd\n")
    found = read([f"{tmp_path}/a.tsv"], config=Data(tokenizer="bytes", header=("label", "text")))
    assert [name.rpartition(":")[2] for name in found] == ["1", "2"]
    assert ord("a") + 3 in next(iter(found.values()))["tokens"]


def test_a_language_model_gets_blocks_and_how_many_tokens_count(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef\n\n")
    long, empty = read([f"{tmp_path}/a.txt"], NEXT).values()
    a, end = ord("a") + 3, 1
    assert long["tokens"].tolist() == [[end, a, a + 1, a + 2, a + 3], [a + 3, a + 4, a + 5, end, end]]
    assert long["count"].tolist() == [4, 3]
    assert (empty["tokens"].tolist(), empty["count"].tolist()) == ([[end] * 5], [1])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "a.txt: empty; wanted a text on each line"),
        ("a.txt", b"ok\n\xff\n", "a.txt:2: not UTF-8"),
        ("a.tsv", b"id\tbody\n1\tx\n", "a.tsv: no column 'text'; it has id, body; write --column NAME"),
        ("a.tsv", b"id\ttext\n1\tx\n2\n", "a.tsv:3: 1 values in 2 columns"),
        ("a.csv", b"text\n", "a.csv: no rows below"),
        ("a.csv", b"text\n\xff\n", "a.csv: not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read([f"{tmp_path}/{name}"])


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="nowhere.txt: no such file; wanted a file with a text on each line, or - for"):
        read(["nowhere.txt"])


def test_a_column_of_json_lines_is_a_text_and_what_lacks_it_names_the_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"said": "ab", "id": 1}\n\n{"id": 2, "said": "c"}\n{"id": 3, "said": 4}\n7\n')
    given = given_texts([f"{tmp_path}/a.jsonl"], CLASSES, CONFIG, columns=Template.alone("said"))
    assert [name.rpartition(":")[2] for name in given.names] == ["1", "3", "4", "5"]
    first, second, number, other = given.load(range(4))
    assert [int(given.to_arrays(stored)["length"][0]) for stored in (first, second)] == [4, 3]
    with pytest.raises(UsageError, match="a.jsonl:4: column 'said': got int; wanted str"):
        given.to_arrays(number)
    with pytest.raises(UsageError, match="a.jsonl:5: wanted a JSON object, got int"):
        given.to_arrays(other)
    with pytest.raises(UsageError, match="a.jsonl:1: no 'text'; it has said, id; write --column said"):
        read([f"{tmp_path}/a.jsonl"])


def test_a_file_of_another_kind_is_no_text_and_a_file_without_columns_has_none(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="a.parquet: wanted a text on each line, or a table"):
        read([f"{tmp_path}/a.parquet"])
    require_tables(["a.txt", "b.CSV"], "said")
    require_tables(["a.txt", "a.jsonl"], "said")
    with pytest.raises(UsageError, match="--column said: a.txt - has lines of text and no columns; leave it out"):
        require_tables(["a.txt", "-"], "said")
