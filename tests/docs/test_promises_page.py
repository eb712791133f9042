"""The tables of docs/promises.md are what its script prints from the results that are committed."""

import json
import pathlib
import sys

import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import promises


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "promises.md").read_text()


@pytest.fixture(scope="module")
def mutants():
    return json.loads(promises.MUTANTS.read_text())


@pytest.fixture(scope="module")
def tables(mutants):
    return promises.page(json.loads(promises.SUITE.read_text()), mutants).split("\n\n")


def test_the_page_shows_what_the_script_prints(tables):
    assert len(tables) == 3
    for table in tables:
        assert table in PAGE


def test_every_survivor_has_a_reason(mutants):
    modules = mutants["modules"]
    assert all(survivor["why"] for module in modules.values() for survivor in module["survivors"])
    assert all(module["killed"] + len(module["survivors"]) == module["mutants"] for module in modules.values())


def test_a_survivor_without_a_reason_is_seen():
    now = {"a.py": {"possible": 3, "mutants": 2, "killed": 1, "survivors": [{"before": " x > 0", "after": " x != 0"}]}}
    known = promises.condensed(now, {}, {("a.py", "x > 0", "x != 0"): "never negative"})
    assert known["a.py"]["survivors"] == [{"before": "x > 0", "after": "x != 0", "why": "never negative"}]
    assert promises.condensed(now, {}, {})["a.py"]["survivors"][0]["why"] == ""
    assert promises.counts(known).splitlines()[2:] == ["| a.py | 0 | 0 | 3 | 2 | 1 |", "| all | 0 | 0 | 3 | 2 | 1 |"]
