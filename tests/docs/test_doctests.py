"""The examples in docstrings."""

import doctest
import importlib
import pathlib

import pytest

import mpjax


PACKAGE = pathlib.Path(mpjax.__file__).parent
MODULES = sorted(
    ".".join(("mpjax", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_an_example_gives_what_it_shows(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


def test_public_functions_have_examples():
    assert {"mpjax.precision.dtypes", "mpjax.precision.policy"} <= set(MODULES)
