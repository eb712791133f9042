"""Prints the tables of docs/promises.md: what the tests cost, and which small faults they notice.

    python benchmarks/promises.py           from benchmarks/results/suite_cpu.json and mutants_cpu.json
    python benchmarks/promises.py --mutants now.json --commits b87ea64 --before then.json
                                            first writes mutants_cpu.json from two outputs of mutants.py, the second
                                            of an earlier commit; without --before its numbers stay as they are
    python benchmarks/promises.py --mutants all.json one.json --commits b87ea64 93d97d3 --again survivors.json
                                            the same from an output of all modules and a later one, which replaces the
                                            modules in it; and from a later run of mutants that survived (mutants.py
                                            --only), whose verdicts replace theirs

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


def combined(outputs, again=()):
    """What several runs of mutants.py wrote of each module, as one.

    Args:
      outputs: by commit, what it wrote of each module. The later of two outputs of a module replaces the other.
      again: what it wrote of mutants that were run again with other tests.

    Raises:
      KeyError: `again` has a mutant that no output has, as of a module that has changed.
    """
    targets = {
        name: target | {"commit": commit} for commit, output in outputs.items() for name, target in output.items()
    }
    for name, target in (each for output in again for each in output.items()):
        decided = targets[name]["decided"]
        if new := target["decided"].keys() - decided.keys():
            raise KeyError(f"{name}: {len(new)} of the mutants that were run again are new")
        targets[name] = targets[name] | {"decided": decided | target["decided"]}
    return targets


def condensed(now, then, reasons):
    """Counts and survivors by module.

    Args:
      now: what mutants.py wrote of each module, with its commit.
      then: the numbers of mutants and of killed ones at an earlier commit, by module.
      reasons: by module, line before and line after.
    """
    modules = {}
    for name, target in now.items():
        decided = sorted(target["decided"].values(), key=lambda one: one["line"])
        changes = [_change(one) for one in decided if one["verdict"] == "survived"]
        modules[name] = {
            **{key: target[key] for key in ("commit", "possible")},
            "mutants": len(decided),
            "killed": len(decided) - len(changes),
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
        rows.append((name.removeprefix("mpjax/"), module["commit"], *numbers))
    rows.append(("all", "", *(sum(column) for column in list(zip(*rows, strict=True))[2:])))
    head = "| module | commit | tried before | killed before | possible | tried | killed |"
    return "\n".join([head, "| --- " * 7 + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows)])


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


def _targets(path):
    return json.loads(path.read_text())["targets"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=pathlib.Path, nargs="+")
    parser.add_argument("--commits", nargs="+", help="of each of --mutants")
    parser.add_argument("--again", type=pathlib.Path, nargs="+", default=[])
    parser.add_argument("--before", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.mutants:
        if len(arguments.mutants) != len(set(arguments.commits or ())):
            parser.error("--commits: wanted the commit of each of --mutants")
        outputs, again = (list(map(_targets, paths)) for paths in (arguments.mutants, arguments.again))
        now = combined(dict(zip(arguments.commits, outputs, strict=True)), again)
        known = json.loads(MUTANTS.read_text())["modules"] if MUTANTS.exists() else {}
        then = {name: module["before"] for name, module in known.items()}
        if arguments.before:
            then = _targets(arguments.before)
        reasons = {
            (name, one["before"], one["after"]): one["why"] for name in known for one in known[name]["survivors"]
        }
        found = {**describe("cosmic_ray"), "modules": condensed(now, then, reasons)}
        MUTANTS.write_text(json.dumps(found, indent=2) + "\n")
    print(page(json.loads(SUITE.read_text()), json.loads(MUTANTS.read_text())))


if __name__ == "__main__":
    main()
