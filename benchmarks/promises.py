"""Prints the tables of docs/promises.md: what the tests cost, and which small faults they notice.

    python benchmarks/promises.py           from benchmarks/results/suite_cpu.json and mutants_cpu.json
    python benchmarks/promises.py --mutants now.json --before then.json
                                            first writes mutants_cpu.json from two outputs of mutants.py, the second
                                            of an earlier commit

A survivor's reason is written by hand, as "why" in mutants_cpu.json; it is kept as long as the survivor is.
"""

import argparse
import json
import pathlib
import sys


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe
from suite import table_of


RESULTS = pathlib.Path(__file__).parent / "results"
MUTANTS, SUITE = RESULTS / "mutants_cpu.json", RESULTS / "suite_cpu.json"


def condensed(now, then, reasons):
    """Counts and survivors by module.

    Args:
      now: what mutants.py wrote of each module.
      then: the same of an earlier commit.
      reasons: by module, line before and line after.
    """
    modules = {}
    for name, target in now.items():
        changes = map(_change, target["survivors"])
        modules[name] = {
            **{key: target[key] for key in ("possible", "mutants", "killed")},
            "before": {key: then.get(name, {}).get(key, 0) for key in ("mutants", "killed")},
            "survivors": [c | {"why": reasons.get((name, c["before"], c["after"]), "")} for c in changes],
        }
    return modules


def _change(survivor):
    return {key: survivor[key].strip() for key in ("before", "after")}


def counts(modules):
    """Mutants by module, now and before, as Markdown."""
    rows = []
    for name, module in modules.items():
        numbers = *module["before"].values(), module["possible"], module["mutants"], module["killed"]
        rows.append((name.removeprefix("mpjax/"), *numbers))
    rows.append(("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
    head = "| module | tried before | killed before | possible | tried | killed |"
    return "\n".join([head, "| --- " * 6 + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def survivors(modules):
    """Survivors with their reasons, as Markdown."""
    lines = ["| module | line | changed to | why no test can tell |", "| --- " * 4 + "|"]
    for name, module in modules.items():
        for survivor in module["survivors"]:
            before, after = (_code(survivor[key]) for key in ("before", "after"))
            lines.append(f"| {name.removeprefix('mpjax/')} | {before} | {after} | {survivor['why']} |")
    return "\n".join(lines)


def _code(text):
    return "``" + text.replace("|", "\\|") + "``" if text else "(taken out)"


def page(suite, mutants):
    """The tables, in the order of the page."""
    parts = [table_of(suite["rings"]), counts(mutants["modules"]), survivors(mutants["modules"])]
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=pathlib.Path)
    parser.add_argument("--before", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.mutants:
        now, then = (json.loads(each.read_text())["targets"] for each in (arguments.mutants, arguments.before))
        known = json.loads(MUTANTS.read_text())["modules"] if MUTANTS.exists() else {}
        reasons = {
            (name, one["before"], one["after"]): one["why"] for name in known for one in known[name]["survivors"]
        }
        found = {**describe("cosmic_ray"), "modules": condensed(now, then, reasons)}
        MUTANTS.write_text(json.dumps(found, indent=2) + "\n")
    print(page(json.loads(SUITE.read_text()), json.loads(MUTANTS.read_text())))


if __name__ == "__main__":
    main()
