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


SURVIVED = {"line": 2, "before": " x > 0", "after": " x != 0", "verdict": "survived"}
KILLED = {"line": 1, "before": "y", "after": "not y", "verdict": "killed"}


def test_a_survivor_without_a_reason_is_seen():
    now = {"a.py": {"commit": "b87ea64", "possible": 3, "decided": {"one": SURVIVED, "two": KILLED}}}
    known = promises.condensed(now, {}, {("a.py", "x > 0", "x != 0"): "never negative"})
    assert known["a.py"]["survivors"] == [{"before": "x > 0", "after": "x != 0", "why": "never negative"}]
    assert promises.condensed(now, {}, {})["a.py"]["survivors"][0]["why"] == ""
    assert promises.counts(known).splitlines()[2:] == [
        "| a.py | b87ea64 | 0 | 0 | 3 | 2 | 1 |",
        "| all |  | 0 | 0 | 3 | 2 | 1 |",
    ]


def test_a_survivor_that_a_new_test_kills_counts_as_killed():
    first = {"a.py": {"possible": 3, "decided": {"one": SURVIVED, "two": KILLED}}}
    again = {"a.py": {"possible": 3, "decided": {"one": SURVIVED | {"verdict": "killed"}}}}
    assert promises.condensed(promises.combined({"b87ea64": first}, [again]), {}, {})["a.py"]["killed"] == 2
    with pytest.raises(KeyError, match="1 of the mutants that were run again are new"):
        promises.combined({"b87ea64": first}, [{"a.py": {"decided": {"three": KILLED}}}])


def test_a_later_run_of_a_module_replaces_the_earlier():
    first = {"a.py": {"possible": 3, "decided": {"one": SURVIVED}}, "b.py": {"possible": 3, "decided": {}}}
    later = {"a.py": {"possible": 5, "decided": {"two": KILLED, "three": KILLED}}}
    found = promises.condensed(promises.combined({"b87ea64": first, "93d97d3": later}), {}, {})
    numbers = [(module["commit"], module["possible"], module["mutants"], module["killed"]) for module in found.values()]
    assert numbers == [("93d97d3", 5, 2, 2), ("b87ea64", 3, 0, 0)]
