"""Pairs of texts become tokens, each by itself, and what is no pair is an error."""

import pytest

from mpjax.config import Data
from mpjax.data.text import text_pairs
from mpjax.errors import UsageError


CONFIG = Data(tokenizer="bytes", length=4, columns={})


def rows_of(source):
    return [source.train[index] for index in range(len(source.train))]


def test_each_text_is_cut_padded_and_counted(table_of):
    source = text_pairs(table_of({"query": "a", "positive": "bcdef"}), CONFIG)
    assert list(source.fields) == ["tokens", "length", "positive", "positive_length"]
    (row,) = rows_of(source)
    assert {name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.items()} == {
        "tokens": [2, 100, 1, 0],
        "length": 3,
        "positive": [2, 101, 102, 1],
        "positive_length": 4,
    }


@pytest.mark.parametrize(
    ("columns", "config"),
    [
        (("anchor", "positive", "negative"), {}),
        (("question", "answer", "other"), {"query": "question", "positive": "answer", "negative": "other"}),
    ],
)
def test_columns_have_usual_names_or_those_of_the_settings(table_of, columns, config):
    table = table_of(dict(zip(columns, ("a", "b", "c"), strict=True)))
    (row,) = rows_of(text_pairs(table, Data(tokenizer="bytes", length=4, columns=config)))
    assert [row[name][1] for name in ("tokens", "positive", "negative")] == [100, 101, 102]


def test_pairs_with_an_empty_text_are_left_out_and_told(table_of):
    table = table_of({"query": "a", "positive": "b"}, {"query": " ", "positive": "b"}, {"query": "c", "positive": ""})
    source = text_pairs(table, CONFIG)
    assert len(source.train) == 1
    assert source.notes == ("split 'train' of 'set': 2 of 3 examples have an empty text and are left out",)


def test_columns_that_are_not_read_are_told(table_of):
    row = {"query": "a", "positive": "b", "negative_1": "c", "label": "d"}
    source = text_pairs(table_of(row), CONFIG)
    assert source.notes == ("'set': pairs of texts do not read the columns negative_1, label",)


@pytest.mark.parametrize(("first", "later"), [("a", "b"), ("b", "a")])
def test_all_examples_have_a_negative_or_none(table_of, tmp_path, first, later):
    (tmp_path / "prep.py").write_text(
        "def prep(row):\n    return {name: row[name] for name in row if row['query'] == 'a' or name != 'negative'}\n"
    )
    table = table_of(*({"query": query, "positive": "c", "negative": "d"} for query in (first, later)))
    config = Data(tokenizer="bytes", length=4, preprocess=f"{tmp_path}/prep.py:prep")
    with pytest.raises(UsageError, match="example 1 has a negative, and the first|example 1: negative is None; wanted"):
        text_pairs(table, config)


@pytest.mark.parametrize(
    ("row", "columns", "says"),
    [
        ({"text": "a"}, {}, "has no pairs of texts; its columns are text; wanted query"),
        ({"query": "a", "anchor": "b", "positive": "c"}, {}, "has both query and anchor"),
        ({"query": "a", "positive": "b"}, {"label": "query"}, "--data.columns label: pairs of texts have the fields"),
        ({"query": "a", "positive": "b"}, {"query": "ask"}, "has no ask; it has query, positive"),
        ({"query": "a", "positive": ["b"]}, {}, r"example 0: positive is \['b'\]; wanted a text"),
        ({"query": "a", "positive": ""}, {}, "none of 1 examples has texts that are not empty"),
    ],
)
def test_what_is_no_pair_is_an_error(table_of, row, columns, says):
    with pytest.raises(UsageError, match=says):
        text_pairs(table_of(row), Data(tokenizer="bytes", length=4, columns=columns))
