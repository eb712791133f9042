"""Texts that are made of several columns, in training and in prediction; what a template may not reach."""

import csv
import re

import pytest

from mpjax.config import Data, PythonObject, check, load_config
from mpjax.data import open_source
from mpjax.data.text import Template, stored_texts, texts_of_table
from mpjax.errors import UsageError


PAIR = "{premise} [SEP] {hypothesis}"
ROWS = [
    {"premise": "it rains", "hypothesis": "wet", "label": 1},
    {"premise": "{label}", "hypothesis": "}{0.__class__}", "label": 0},
]


def opened(template=PAIR, task="text_classification", rows=ROWS, **settings):
    name = PythonObject(lambda: (rows, rows))
    settings |= {"num_classes": 2} if task == "text_classification" else {}
    return open_source(Data(name=name, text_template=template, length=64, **settings), None, task)


def text(tokens):
    """The text of tokens that are bytes: b + 3, after a start (2), before an end (1) and padding (0)."""
    return bytes(int(token) - 3 for token in tokens if token > 2).decode()


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{a}", "A"),
        ("{a} [SEP] {b}", "A [SEP] {a}"),
        ("{b}{a}{b}", "{a}A{a}"),
        ("{{{a}}} {{b}}", "{A} {b}"),
        ("{a.b} {x y}", "dotted spaced"),
    ],
)
def test_a_gap_is_filled_by_the_column_of_that_name_and_texts_are_no_templates(template, filled):
    values = {"a": "A", "b": b"{a}", "a.b": "dotted", "x y": "spaced", "c": 3}
    assert Template.parse(template).filled(values, "here") == filled


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("no gap", "names no column; write one in braces, as in {premise}"),
        ("{{a}}", "names no column"),
        ("{a", "expected '}' before end of string; wanted a name of a column in braces"),
        (
            "a} {b}",
            "Single '}' encountered in format string; wanted a name of a column in braces",
        ),
        ("{}", "{} is not the name of a column alone"),
        ("{a!r}", "{a!r} is not the name of a column alone"),
        ("{a:>9}", "{a:>9} is not the name of a column alone"),
        ("{a:{b}}", "{a:{b}} is not the name of a column alone"),
    ],
)
def test_what_is_no_template_is_told(template, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Template.parse(template)


@pytest.mark.parametrize("reach", ["{premise.__class__}", "{premise[0]}", "{label.__init__.__globals__}"])
def test_an_attribute_or_an_index_is_only_a_column_that_does_not_exist(reach):
    with pytest.raises(UsageError, match="has no column '.*'; it has premise, hypothesis, label"):
        opened(reach)


def test_two_columns_are_one_text_to_classify():
    source = opened()
    assert text(source.train[0]["tokens"]) == "it rains [SEP] wet"
    assert text(source.test[1]["tokens"]) == "{label} [SEP] }{0.__class__}"
    assert [int(example["label"]) for example in (source.train[0], source.train[1])] == [1, 0]
    assert source.fields["tokens"].origin == f"column '{PAIR}'"


def test_and_a_text_to_model():
    source = opened("Q: {premise} A: {hypothesis}", "language_modeling", rows=ROWS[:1] * 5)
    assert text(source.train[0]["tokens"]).startswith("Q: it rains A: wetQ: it rains A: wet")


def test_classes_of_text_are_numbered_beside_it(tmp_path):
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    with open(tmp_path / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([("premise", "hypothesis", "label"), ("a", "b", "yes"), ("c", "", "no")])
    config = Data(name=f"hf:{tmp_path / 'pairs.csv'}", text_template=PAIR, test_split="train")
    source = open_source(config, None, "text_classification")
    assert source.fields["label"].names == ("no", "yes")
    assert [text(source.train[at]["tokens"]) for at in (0, 1)] == ["a [SEP] b", "c [SEP] "]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{premis}", r"data set '.*' has no column 'premis'; it has premise, .*; did you mean {premise}\?"),
        ("{premise} {label}", "column 'label' of '.*' is .*; wanted columns of text"),
    ],
)
def test_a_column_that_is_missing_or_no_text_is_told(template, said):
    with pytest.raises(UsageError, match=said):
        opened(template)


def test_several_columns_of_text_without_a_template_are_refused_with_one_that_works():
    rows = [{"premise": "a", "hypothesis": "b", "label": 1}, {"premise": "c", "hypothesis": "d", "label": 0}]
    with pytest.raises(UsageError, match="or join several, as in --data.text_template '{premise} {hypothesis}'$"):
        opened("", rows=rows)
    assert text(opened("{premise} {hypothesis}", rows=rows).train[1]["tokens"]) == "c d"


def test_a_text_may_not_hold_the_label():
    rows = [{"premise": "a", "label": "yes"}, {"premise": "b", "label": "no"}]
    with pytest.raises(UsageError, match="column 'label' is predicted, and the text would tell it; leave it out of"):
        opened("{premise} {label}", rows=rows, columns={"label": "label"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--task", "classification"], "joins texts, which --task classification does not read: leave it out"),
        (["--task", "own"], "joins texts, which --task own does not read"),
        (
            ["--task", "text_classification", "--data.columns", "text", "premise"],
            "--data.columns text premise: wanted one; a template may be one column, {premise}",
        ),
    ],
)
def test_where_it_would_have_no_effect_it_is_an_error(flags, said):
    with pytest.raises(UsageError, match=said):
        check(load_config([*flags, "--data.text_template", PAIR]))


def test_a_table_to_predict_is_joined_as_in_training():
    content = b"hypothesis,id,premise\nwet,7,it rains\n,8,dry\nx\n"
    rows = list(texts_of_table("a.csv", content, Template.parse(PAIR), delimiter=","))
    assert rows[:2] == [("a.csv:2", "it rains [SEP] wet"), ("a.csv:3", "dry [SEP] ")]
    assert str(rows[2][1]) == "a.csv:4: 1 values in 3 columns; wanted one for each"
    said = "a.csv: no column 'premise'; it has text; wanted the columns of the run's --data.text_template"
    with pytest.raises(UsageError, match=said):
        list(texts_of_table("a.csv", b"text\nx\n", Template.parse(PAIR), delimiter=","))


@pytest.mark.parametrize("template", [PAIR, "Review: {text}"])
def test_lines_without_columns_are_refused(tmp_path, template):
    (tmp_path / "a.txt").write_text("it rains [SEP] wet\n")
    with pytest.raises(UsageError, match="wanted a table with these columns, FILE.csv, FILE.tsv or FILE.jsonl"):
        stored_texts([str(tmp_path / "a.txt")], Template.parse(template))
