"""docs/guarantees.md: every promise names tests, and all of them are there."""

import ast
import functools
import pathlib
import re


ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
FAMILIES = (ROOT / "docs" / "promises.md").read_text()


@functools.cache
def those_of(file):
    """The tests of a file, those of a class as `Class::test`."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_test_on_the_page_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE + FAMILIES)
    assert len(named) > 100
    assert [f"{file}::{test}" for file, test in named if not test or test not in those_of(file)] == []


def test_every_promise_has_a_test():
    promises = re.split(r"^- ", PAGE.partition("\n## ")[2], flags=re.MULTILINE)[1:]
    assert len(promises) > 40
    assert [promise for promise in promises if "\n  - `tests/" not in promise] == []
