"""A mistake on the command line is one error, whose first line says it all."""

import dataclasses
import sys
from typing import Annotated, Literal

import pytest

from mpjax.config import Integers, Limit, message_of, parse, parse_with
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Bake, as `train.py --help` says."""

    loaf: str
    """Bread."""
    minutes: int = 30
    """Time in the oven."""


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (
            ["--loaf", "rye", "--minuts=3"],
            "unrecognized options: --minuts=3; did you mean --minutes? (bake --help lists",
        ),
        ([], "missing from bake: --loaf STR Bread. (required) (bake --help lists all)"),
        (["--loaf", "rye", "--minutes", "few"], "--minutes: invalid literal for int"),
        (["--loaf"], "missing value for argument '--loaf'. Expected 1 values. (bake --help lists all)"),
    ],
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_first_line_says_what_is_wrong_and_what_is_meant(monkeypatch, argv, first, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UsageError) as raised:
        parse(Settings, argv, prog="bake")
    message = str(raised.value)
    assert message.splitlines()[0].startswith(first)
    assert not set("│─╭╮╰╯|") & set(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oven:
    """Heats."""

    shelf: Annotated[int, Limit("1 or 2", (1, 2).__contains__)] = 1
    """Which."""
    heat: float = 180.0
    """Degrees."""
    mode: Literal["fan", "grill"] = "fan"
    """How."""
    trays: Integers = ()
    """Numbers."""


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ("--shelf x --heat y", ["--heat: could not convert", "--shelf: invalid literal for int"]),
        ("--shelf 3 --heat y", ["--heat: could not convert", "--shelf is 3: wanted 1 or 2"]),
        ("--shelf=3 --mode off", ["--shelf is 3: wanted 1 or 2", "invalid choice 'off' for argument '--mode'"]),
        ("--trays 1 b 2 --shelf 3", ["--shelf is 3: wanted 1 or 2", "--trays: wanted whole numbers, got 'b'"]),
        (
            "--shlf 3 --heat y --shelf -1",
            ["--heat: could", "--shelf is -1: wanted", "unrecognized options: --shlf, 3"],
        ),
        ("--heat y --shelf 3 --heat z", ["--heat: could not convert", "--shelf is 3: wanted 1 or 2"]),
        ("--heat --shelf 3", ["--shelf is 3: wanted 1 or 2", "missing value for argument '--heat'"]),
    ],
)
def test_several_faults_have_a_line_each(argv, lines):
    with pytest.raises(UsageError) as raised:
        parse(Oven, argv.split(), prog="bake")
    found = sorted(str(raised.value).splitlines())
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


def test_a_value_that_was_taken_for_another_is_not_missing():
    with pytest.raises(UsageError) as raised:
        parse(Settings, ["--minutes", "few", "--loaf"], prog="bake")
    assert "missing from" not in str(raised.value)


def test_what_the_parser_adds_stands_below_without_its_box():
    box = "+- Value error -+\n| Error parsing --a: bad  |\n| --- |\n| Argument helptext: |\n|     --a INT |\n+---+\n"
    assert message_of(box, "x") == "--a: bad (x --help lists all)\n  Argument helptext:\n      --a INT"


def test_a_box_without_sides_is_read_too():
    """As the parser draws it where stdout is not UTF-8."""
    box = " Parsing error \n --- \n  Error parsing --a: bad \n  ---\n  Argument helptext:\n      --a INT\n"
    assert message_of(box, "x") == "--a: bad (x --help lists all)\n  Argument helptext:\n      --a INT"


def test_a_message_of_another_form_is_kept():
    assert message_of("something is wrong\n", "x") == "something is wrong"
    assert message_of("", "x") == "wrong arguments; x --help lists all"


def test_arguments_of_others_are_returned():
    settings, rest = parse_with(Settings, ["--loaf", "rye", "--x.y", "3"], list, prog="bake")
    assert (settings, rest) == (Settings(loaf="rye"), ["--x.y", "3"])


def test_help_names_other_commands_as_they_are_typed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/env/bin/mpjax"])
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, ["--help"], prog="mpjax bake")
    out = capsys.readouterr().out
    assert (stopped.value.code, "usage: mpjax bake" in out, "as `mpjax train --help` says" in out) == (0, True, True)
