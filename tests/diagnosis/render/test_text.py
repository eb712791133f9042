"""A diagnosis in words: numbers of a row, and what a terminal shows beside them."""

import io

import pytest
from rich.console import Console

from mpjax.diagnosis.render import COLUMNS, error_text, percent, rich_of, row_texts, text_of


def test_a_row_has_a_text_for_each_column(row_of):
    texts = row_texts(row_of("a", "backward", {-3: 1, 5: 2}, dtype="bfloat16", overflow=1.0, error=0.25, own_error=0.0))
    assert dict(zip(COLUMNS, texts, strict=True)) == {
        "path": "a",
        "direction": "backward",
        "dtype": "bfloat16",
        "log2 range": "-3..5",
        "overflow %": "100",
        "underflow %": "0",
        "subnormal %": "0",
        "error": "2.5e-01",
        "own error": "0",
    }


def test_an_own_error_that_was_not_measured_is_not_called_zero(row_of):
    assert row_texts(row_of("a"))[-2:] == ("0", "-")


@pytest.mark.parametrize(
    ("share", "text"), [(1e-4, "0.01"), (0.1, "10.0"), (0.999, "99.9"), (0.9991, ">99.9"), (0.001, "0.10")]
)
def test_a_share_has_as_many_digits_as_matter(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(("error", "text"), [(0.0, "0"), (1e-300, "1.0e-300"), (2.0, "2.0e+00"), (float("inf"), "inf")])
def test_an_error_is_zero_only_where_it_is_exactly_that(error, text):
    assert error_text(error) == text


def test_what_the_text_says_ends_without_spaces_and_has_no_head_without_rows(row_of, facts_of):
    assert text_of(facts_of()) == "verdict: healthy\nAll is well."
    lines = text_of(facts_of(row_of("a"), row_of("long", own_error=0.125))).splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert len({len(line) for line in lines[-3:]}) == 1


@pytest.mark.parametrize(
    ("verdict", "color"),
    [("healthy", "green"), ("not_precision", "yellow"), ("overflow", "red"), ("loss_scale", "red")],
)
def test_the_color_tells_a_fault_of_precision_from_another_and_from_none(facts_of, verdict, color):
    headline, *_ = rich_of(facts_of(verdict=verdict)).renderables
    assert headline.plain == f"verdict: {verdict}"
    assert headline.style == f"bold {color}"


def test_a_terminal_shows_what_to_paste_only_where_there_is_something(facts_of):
    def shown(**fields):
        console = Console(file=io.StringIO(), width=80, color_system=None)
        console.print(rich_of(facts_of(**fields)))
        return console.file.getvalue()

    assert "[precision]" not in shown()
    text = shown(verdict="loss_scale", better_scale=512.0)
    assert 'loss_scale = "512"' in text
    assert "--precision.loss_scale 512" in text
