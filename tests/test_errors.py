"""How a caller catches the exceptions of mpjax, silences its warnings, and what each means for the exit code."""

import pickle
import warnings

import pytest

from mpjax import cli, errors
from mpjax.errors import (
    CheckpointWarning,
    DataWarning,
    Diverged,
    DtypeError,
    Interrupted,
    LoggerWarning,
    PrecisionWarning,
    UsageError,
    reason_of,
)


WARNINGS = [PrecisionWarning, DataWarning, CheckpointWarning, LoggerWarning]


@pytest.mark.parametrize("caught", [UsageError, ValueError, TypeError])
def test_a_wrong_dtype_is_caught_as_wrong_input_as_a_value_and_as_a_type(caught):
    with pytest.raises(caught, match="head/kernel"):
        raise DtypeError("head/kernel is float16")


@pytest.mark.parametrize("error", [Diverged("loss is nan"), Interrupted("stopped", 15)])
def test_whoever_catches_wrong_input_does_not_swallow_a_run_that_ended(error):
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, UsageError | ValueError | TypeError)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(), "OSError"), (ValueError("no hub.\nsee above"), "no hub"), (ValueError("x" * 300), "x" * 200)],
)
def test_a_reason_is_one_line_also_of_an_error_without_a_message(error, reason):
    assert reason_of(error) == reason


def test_a_wrong_dtype_exits_as_wrong_input_does(capsys):
    def fails():
        raise DtypeError("head/kernel is float16, wanted float32")

    assert cli.exit_code(fails) == 2
    assert capsys.readouterr().err == "error: head/kernel is float16, wanted float32\n"


@pytest.mark.parametrize(("number", "code"), [(15, 143), (None, 130)])
def test_an_interruption_without_a_number_counts_as_ctrl_c(number, code):
    def fails():
        raise Interrupted("stopped at step 3", number)

    assert cli.exit_code(fails) == code
    assert str(Interrupted("stopped at step 3", number)) == "stopped at step 3"


@pytest.mark.parametrize("category", WARNINGS)
def test_each_kind_of_warning_is_shown_on_a_line_and_silenced_alone(category, capsys):
    def warns():
        for kind in WARNINGS:
            warnings.warn(kind.__name__, kind, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", category)
        assert cli.exit_code(warns) == 0
    shown = [f"warning: {kind.__name__}" for kind in WARNINGS if kind is not category]
    assert capsys.readouterr().err.splitlines() == shown


def test_every_warning_is_one_that_python_shows_to_users():
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Warning)]
    assert found == WARNINGS
    assert all(issubclass(kind, UserWarning) for kind in found)


def test_an_interruption_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(Interrupted("stopped", 15)))
    assert (str(error), error.signal_number) == ("stopped", 15)


def test_a_repair_is_kept_when_an_error_is_sent_to_another_process():
    error = pickle.loads(pickle.dumps(UsageError("too large", repair={"data.batch_size": 4})))
    assert (str(error), error.repair) == ("too large", {"data.batch_size": 4})
    assert UsageError("wrong").repair == {}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DtypeError("wrong"), 2),
        (Diverged("loss is nan"), 3),
        (Interrupted("stopped", 15), 143),
        (KeyboardInterrupt(), 130),
        (OSError("full"), 1),
        (RuntimeError("a fault"), 1),
    ],
)
def test_each_error_has_its_exit_code(error, code):
    assert errors.exit_code_of(error) == code


def test_an_error_of_other_code_is_told_in_one_line():
    error = ZeroDivisionError("by zero.\nThe error occurred while tracing")
    assert errors.first_line(error) == "ZeroDivisionError: by zero"
    assert errors.first_line(KeyError()) == "KeyError: "


def test_names_neither_turn_nor_break_a_line():
    marks = "\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069"
    assert errors.printable(marks) == r"\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069"


def test_names_hold_no_commands_for_the_terminal():
    assert errors.printable("a\x1b[2J\x9b1m\u202etxt\r\x07 ä\tb\nc") == "a\\x1b[2J\\x9b1m\\u202etxt\\r\\x07 ä\tb\nc"
