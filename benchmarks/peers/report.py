"""Markdown tables from the results."""

from collections.abc import Callable, Mapping

from peers.tasks import DESCRIPTIONS


def tables(results: Mapping) -> str:
    """All of them, with a heading each."""
    parts = []
    for task in results.get("speed", {}):
        parts += [
            f"{DESCRIPTIONS[task]}: mpjax's time of a step as a share of the other's (quartiles)",
            ratios(results, task, "ratios"),
            "The same of the time of all cores together, in which less is seen of what else the machine does",
            ratios(results, task, "core_ratios"),
            "Milliseconds of a step, and seconds of the first call, which compiles",
            seconds(results, task),
            *not_timed(results, task),
        ]
    if "promises" in results:
        parts += ["What holds", promises(results), "On what it rests", evidence(results)]
    if missing := results.get("not_installed"):
        parts.append(f"Not installed: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def ratios(results: Mapping, task: str, which: str) -> str:
    def cell(one: Mapping, name: str) -> str:
        ratio = one[which][name]
        return f"{ratio['of_medians']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})"

    return _by_dtype("mpjax beside", results["speed"][task], which, cell)


def seconds(results: Mapping, task: str) -> str:
    def cell(one: Mapping, name: str) -> str:
        return f"{1000 * one['step_seconds'][name]:.1f}, {one['first_call_seconds'][name]:.1f} s"

    return _by_dtype("", results["speed"][task], "step_seconds", cell)


def not_timed(results: Mapping, task: str) -> list[str]:
    """Why, in a line for each."""
    found = results["speed"][task]
    return [f"{name}, {dtype}: {why}" for dtype, one in found.items() for name, why in one["failed"].items()]


def _by_dtype(corner: str, found: Mapping, which: str, cell: Callable[[Mapping, str], str]) -> str:
    """A row for each framework that `which` has, a column for each dtype."""

    def words(one: Mapping, name: str) -> str:
        return cell(one, name) if name in one[which] else "not timed" if name in one["failed"] else ""

    names = list(found["float32"][which])
    return _table([corner, *found], [[name, *(words(one, name) for one in found.values())] for name in names])


def promises(results: Mapping) -> str:
    found = results["promises"]
    names = list(next(iter(found.values())))
    marks = {"passes": "yes", "fails": "no", "not offered": "not offered"}
    return _table(
        ["", *names], [[sentence, *(marks[found[sentence][name]["verdict"]] for name in names)] for sentence in found]
    )


def evidence(results: Mapping) -> str:
    found = results["promises"]
    rows = [
        [sentence, name, one["verdict"], one["evidence"]] for sentence in found for name, one in found[sentence].items()
    ]
    return _table(["", "", "verdict", "evidence"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
