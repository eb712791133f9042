"""The lower bounds that pyproject.toml states are those that are tested."""

import pathlib
import re
import tomllib


ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {"ruff", "pyright", "pre-commit"}
"""What checks the code, but does not run with it."""


def padded(version):
    return ".".join((*version.split("."), "0", "0")[:3])


def bounds(requirements):
    found = [re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", requirement) for requirement in requirements]
    assert all(found), "each requirement has a lower bound and no upper one"
    return {match[1]: padded(match[2]) for match in found if match[1] not in TOOLS}


def test_each_lower_bound_is_tested():
    lines = (ROOT / "constraints/lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = bounds([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]])
    assert {name: padded(version) for name, version in lowest.items()} == wanted


def test_the_page_says_which_python_and_jax():
    page = (ROOT / "docs/versions.md").read_text()
    assert f"| Python | {PROJECT['requires-python'].removeprefix('>=')} and later |" in page
    assert f"| JAX | {bounds(PROJECT['dependencies'])['jax']} and later |" in page
