"""What docs/features.md claims: its tests, settings and commands exist, and each entry says yes, partly or no."""

import ast
import dataclasses
import pathlib
import re

import pytest

from mpjax.cli import COMMANDS
from mpjax.config import Config


ROOT = pathlib.Path(__file__).parents[2]
TABLES = [
    [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/features.md").read_text(), re.MULTILINE)
]
FEATURES = TABLES[0][2:]
SHOWN = {row[0]: row[1].strip("`| ") for row in TABLES[1][2:]}


def flags(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = prefix + field.name
        yield from flags(value, f"{name}.") if dataclasses.is_dataclass(value) else (name,)


def test_there_are_23_features_and_a_test_for_each():
    assert TABLES[0][0] == ["feature", "mpjax", "Lightning", "Keras", "HF Trainer", "timm"]
    assert len(FEATURES) == 23
    assert [row[0] for row in FEATURES] == list(SHOWN)


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0])
def test_each_entry_says_yes_partly_or_no_and_partly_says_why(row):
    assert len(row) == 6
    for entry in row[1:]:
        assert re.fullmatch(r"(yes|no)(: .+)?|partly: .+", entry.strip(" |")), entry


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0])
def test_the_settings_and_commands_of_mpjax_exist(row):
    known = set(flags(Config()))
    assert set(re.findall(r"--([a-z_.]+)", row[1])) <= known
    assert set(re.findall(r"`mpjax ([a-z_]+)", row[1])) <= set(COMMANDS)


@pytest.mark.parametrize("feature", SHOWN)
def test_the_test_that_shows_it_exists(feature):
    file, _, name = SHOWN[feature].partition("::")
    defined = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in defined
