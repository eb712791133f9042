"""Durations read, written and turned into steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.config import Duration, parse_duration
from mpjax.errors import UsageError


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("500", 500, "steps"),
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("1e3", 1000, "steps"),
        ("1e6 examples", 1_000_000, "examples"),
        ("1E6examples", 1_000_000, "examples"),
        ("30 epochs", 30, "epochs"),
        ("1 epoch", 1, "epochs"),
        (".5 epochs", 0.5, "epochs"),
        (".5e6 examples", 500_000, "examples"),
        ("  0.5  Epochs ", 0.5, "epochs"),
        ("2. epochs", 2, "epochs"),
    ],
)
def test_a_duration_is_read_and_survives_writing(text, amount, unit):
    duration = parse_duration(text)
    assert duration == Duration(amount, unit)
    assert parse_duration(str(duration)) == duration


@pytest.mark.parametrize("text", ["", "epochs", "-5", "5 weeks", "1.2.3", ".", "0x10", "1,000", "nan", "inf", "5 6"])
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=rf"bad duration '{text}': wanted e.g. '500', '500 steps', '1e6 examples'"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["1.5", "2.5 steps", "1e999 epochs"])
def test_part_of_a_step_and_infinity_are_refused(text):
    with pytest.raises(ValueError, match="wanted a whole number of steps"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7", 7),
        ("640 examples", 10),
        ("100 examples", 2),
        ("1 examples", 1),
        ("2 epochs", 44),
        ("0.5 epochs", 11),
        ("0.001 epochs", 1),
        ("0", 0),
        ("0 epochs", 0),
    ],
)
def test_in_steps_of_64_examples_and_epochs_of_22_steps(text, steps):
    assert parse_duration(text).in_steps(64, 22) == steps


@pytest.mark.parametrize("text", ["1e300 epochs", "2147483648", "1e20 examples"])
def test_more_steps_than_int32_counts_are_refused(text):
    with pytest.raises(UsageError, match="steps: wanted at most 2,147,483,647"):
        parse_duration(text).in_steps(8, 100)


def test_as_many_as_int32_counts_are_not():
    assert parse_duration("2147483647").in_steps(8, 100) == 2**31 - 1


@settings(max_examples=200)
@given(st.floats(0, 1e300), st.sampled_from(["examples", "epochs"]))
def test_any_duration_survives_writing(amount, unit):
    assert parse_duration(str(Duration(amount, unit))) == Duration(amount, unit)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.text() | st.from_regex(r"[0-9.e+-]{0,400} ?(steps|examples|epochs)?", fullmatch=True))
def test_any_text_is_a_duration_or_refused_by_name(text):
    try:
        found = parse_duration(text).in_steps(64, 22)
    except UsageError as error:
        found = str(error)
    if isinstance(found, str):
        assert text in found or "wanted at most 2,147,483,647" in found
    else:
        assert 0 <= found < 2**31
