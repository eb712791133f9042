"""The lower bounds that pyproject.toml states are those that are tested."""

import json
import pathlib
import re
import runpy
import tomllib


ROOT = pathlib.Path(__file__).parents[1]
VERSIONS = runpy.run_path(str(ROOT / "benchmarks/versions.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {"ruff", "pyright", "pre-commit"}
"""What checks the code, but does not run with it."""


def padded(version):
    return ".".join((*version.split("."), "0", "0")[:3])


def bounds(requirements):
    upper = {"orbax-checkpoint": ",<1"}  # what is known to break
    found = [re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)(,<\d+)?", requirement) for requirement in requirements]
    assert all(found), "each requirement has a lower bound"
    assert {match[1]: match[3] for match in found if match[3]}.items() <= upper.items()
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


def test_page_readme_and_classifiers_say_what_was_run():
    texts = tuple((ROOT / name).read_text() for name in ("docs/versions.md", "README.md", "pyproject.toml"))
    assert VERSIONS["written"](json.loads(VERSIONS["SUITE"].read_text())["rings"], *texts) == texts


def test_other_runs_give_other_tables_lines_and_classifiers():
    packages = dict.fromkeys(VERSIONS["PACKAGES"], "1.2")
    rings = {
        f"quick {python}": {
            "python": f"{python}.1",
            "versions": {**packages, "jax": jax},
            "date": "2026-01-02",
            "passed": 1234,
            "skipped": 5,
            "wall": 90.0,
        }
        for python, jax in (("3.9", "0.9"), ("3.10", "0.10"))
    }
    page, readme, project = (
        "## What was run\n\nWords.\n\n| old |\n\n## Next\n",
        "a\nTested on Python 2.\nb\n",
        '  "Programming Language :: Python :: 3.8",\n',
    )
    page, readme, project = VERSIONS["written"](rings, page, readme, project)
    assert page.splitlines()[7] == "| quick | 3.10.1 | 0.10 |" + " 1.2 |" * 6 + " 1,234 | 5 | 1.5 | 2026-01-02 |"
    assert page.endswith("\n\n## Next\n")
    assert readme == "a\nTested on Python 3.9 and 3.10, with jax 0.9 and 0.10.\nb\n"
    assert project.count("\n") == 2
