"""Writes what was tested into docs/versions.md, README.md and the classifiers of pyproject.toml.

It reads benchmarks/results/suite_cpu.json, which .ci/run writes if CI_RECORD names that file.

    python benchmarks/versions.py
"""

import json
import pathlib
import re


ROOT = pathlib.Path(__file__).parents[1]
SUITE = ROOT / "benchmarks/results/suite_cpu.json"
PACKAGES = ("jax", "flax", "optax", "numpy", "orbax-checkpoint", "grain", "tyro")


def pythons(rings):
    """The minor versions of Python that the README's tests passed on, `3.11`, oldest first."""
    found = {".".join(ring["python"].split(".")[:2]) for name, ring in rings.items() if name.startswith("quick")}
    return sorted(found, key=_parts)


def _parts(version):
    return [int(part) for part in version.split(".")]


def table(rings):
    """What was run, where and with which outcome, as Markdown."""
    lines = [f"| tests | Python | {' | '.join(PACKAGES)} | passed | skipped | minutes | date |"]
    lines.append("| --- " * (6 + len(PACKAGES)) + "|")
    for name, ring in rings.items():
        versions = " | ".join(ring["versions"][package] for package in PACKAGES)
        outcomes = f"{ring['passed']:,} | {ring.get('skipped', 0):,} | {ring['wall'] / 60:.1f}"
        lines.append(f"| {name.split(' ')[0]} | {ring['python']} | {versions} | {outcomes} | {ring['date']} |")
    return "\n".join(lines)


def sentence(rings):
    """The line of the README."""
    jax = sorted({ring["versions"]["jax"] for ring in rings.values()}, key=_parts)
    return f"Tested on Python {_listed(pythons(rings))}, with jax {_listed(jax)}."


def _listed(words):
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def classifiers(rings):
    """The lines of pyproject.toml."""
    return "".join(f'  "Programming Language :: Python :: {version}",\n' for version in pythons(rings))


def written(rings, page, readme, project):
    """The three texts with what was tested.

    Args:
      rings: what suite_cpu.json has of each run of tests.
      page: docs/versions.md, with a table under "## What was run".
      readme: README.md, with a line that begins with "Tested on Python".
      project: pyproject.toml, with a line for each version of Python.
    """
    page = re.sub(r"(## What was run\n\n(?:[^|\n].*\n|\n)*)(?:\|.*\n)+", lambda m: f"{m[1]}{table(rings)}\n", page)
    readme = re.sub(r"^Tested on Python .*$", sentence(rings), readme, flags=re.M)
    line = r'(?:  "Programming Language :: Python :: 3\.\d+",\n)+'
    return page, readme, re.sub(line, classifiers(rings), project)


def main():
    """Rewrites the three files."""
    files = [ROOT / name for name in ("docs/versions.md", "README.md", "pyproject.toml")]
    rings = json.loads(SUITE.read_text())["rings"]
    for file, text in zip(files, written(rings, *(file.read_text() for file in files)), strict=True):
        file.write_text(text)


if __name__ == "__main__":
    main()
