"""Writes and reads history.jsonl, which records the settings, versions and devices under which a run's steps ran.

Each line is for the steps that one process ran under one set of settings. A checkpoint holds the lines up to it. A
resumed run writes the file anew from these lines and a line of its own. So lost lines are restored, and lines of lost
steps disappear.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax import strict_json
from mpjax.config.save import OF_ONE_COMMAND, changes
from mpjax.errors import UsageError
from mpjax.loop.best import BEST_ANEW
from mpjax.report.jsonl import read_metrics


HISTORY_FILE = "history.jsonl"

History = Sequence[Mapping[str, Any]]
"""The lines, in the order of their steps.

A line has `step` (the attempted steps before those of the line), `seconds_before` (the seconds of the run before them),
`policy`, `changed` (the old and new text of each setting that changes here), and the content of environment.json. If a
run started without a history, its first line has `told_by` (the checkpoint) instead of the environment. If
metrics.jsonl has lost lines of earlier steps, `metrics_missing` has the first and last step that are lost. If the
search for the best checkpoint begins anew at `step`, `best_anew` lists, as texts, what has changed.
"""


def continued(
    before: Mapping[str, Any],
    step: int,
    about: Mapping[str, Any],
    environment: Mapping[str, Any],
    missing: tuple[int, int] | None = None,
    anew: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Extends the history of a run by a line for the steps that this process will run.

    The result is the lines in `before` that begin before `step`, and the new line, with the keys of `History`.
    For a new run it is the new line only. Settings of one command (`OF_ONE_COMMAND`) do not count as changed.

    Args:
      before: the description stored in the checkpoint that the run resumes from; empty for a new run.
      step: the number of attempted steps so far.
      about: the description that future checkpoints will store: `policy`, and `config` as TOML.
      environment: the content of environment.json.
      missing: the first and the last step that metrics.jsonl lacks; None if it lacks none.
      anew: what has changed so that the search for the best checkpoint begins anew; empty if it goes on.
    """
    changed = changes(before["config"], about["config"], apart_from=OF_ONE_COMMAND) if before else ()
    line = {
        "step": step,
        "seconds_before": float(before.get("seconds", 0.0)),
        "policy": about["policy"],
        "changed": {name: [old, new] for name, old, new in changed},
        **({"metrics_missing": list(missing)} if missing else {}),
        **({BEST_ANEW: list(anew)} if anew else {}),
        **environment,
    }
    return [*(earlier for earlier in history_in(before, step) if earlier["step"] < step), line] if before else [line]


def history_in(about: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """The history in the description of a checkpoint, `about`.

    If there is none, or it is damaged, the result is one line from step 0 with the checkpoint's policy. Its `told_by`
    names the checkpoint of `step`.
    """
    known = about.get("history")
    if isinstance(known, list) and known and all(map(_is_line, known)):
        return known
    line = {"step": 0, "seconds_before": 0.0, "policy": str(about["policy"]), "changed": {}}
    return [line | {"told_by": f"the checkpoint of step {step}"}]


def begins(history: History, about: Mapping[str, Any]) -> bool:
    """True if `history` begins with the lines of a checkpoint's history, `about["history"]`; False if that has none."""
    known = about.get("history")
    return isinstance(known, list) and bool(known) and known == list(history[: len(known)])


def lines_of(history: History) -> bytes:
    """Encodes a history as the content of history.jsonl, one JSON object per line."""
    return b"".join(strict_json.encode(line).encode() + b"\n" for line in history)


def read_history(path: Path) -> History:
    """Reads a history.jsonl.

    A missing file, as in old runs, is an empty history; an incomplete last line is ignored.

    Raises:
      UsageError: a line is damaged.
      OSError: the file cannot be read.
    """
    history = read_metrics(path) if path.exists() else []
    for number, line in enumerate(history, start=1):
        if not _is_line(line):
            raise UsageError(
                f"{path}, line {number} is damaged: remove the file; the checkpoints have it too, and a resumed run "
                "writes it again"
            )
    return history


def _is_line(line: Any) -> bool:
    """True if a line has `step`, `policy` and `changed`, and all entries that are read here have the right types."""
    if not (isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("policy"), str)):
        return False
    changed, missing = line.get("changed"), line.get("metrics_missing", [0, 0])
    anew = line.get(BEST_ANEW, [])
    if not isinstance(anew, list) or not all(isinstance(text, str) for text in anew):
        return False
    settings = changed.values() if isinstance(changed, dict) else [None]
    return all(_is_pair(pair, str) for pair in settings) and _is_pair(missing, int)


def _is_pair(value: Any, kind: type) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, kind) for item in value)


def policies_of(history: History, policy: str = "") -> str:
    """Describes the policies of a run over its steps. Returns `policy` if the history is empty.

    >>> policies_of([{"step": 0, "policy": "float32"}, {"step": 9, "policy": "float16"}])
    'float32 to step 9, then float16'
    """
    return _over_steps([(line["step"], line["policy"]) for line in history]) or policy


def changed_settings(history: History) -> dict[str, str]:
    """Describes each setting that changed during a run by its values over the steps; empty if none changed.

    >>> changed_settings([{"step": 9, "changed": {"seed": ["0", "1"]}}, {"step": 20, "changed": {"seed": ["1", "0"]}}])
    {'seed': '0 to step 9, then 1 to step 20, then 0'}
    """
    values: dict[str, list[tuple[int, str]]] = {}
    for line in history:
        for name, (old, new) in line["changed"].items():
            values.setdefault(name, [(0, old)]).append((line["step"], new))
    return {name: _over_steps(pairs) for name, pairs in values.items()}


def _over_steps(values: Sequence[tuple[int, str]]) -> str:
    """Joins values, given with their first steps, in words: "a to step 9, then b". Equal neighbours are merged."""
    kept = [pair for index, pair in enumerate(values) if index == 0 or pair[1] != values[index - 1][1]]
    ends = [f" to step {step:,}" for step, _ in kept[1:]]
    return ", then ".join(value + end for (_, value), end in zip(kept, [*ends, ""], strict=True)) if kept else ""


_NOT_OF_RESULTS = ("loop.", "report.", "data.data_dir")
"""Prefixes of settings that only control when and where files are written."""


def turns_of(history: History) -> dict[int, str]:
    """Describes the changes of settings that affect results, by the number of steps attempted before the change.

    Settings that start with one of `_NOT_OF_RESULTS` are ignored, and so are steps with no other change.

    >>> turns_of([{"step": 9, "changed": {"seed": ["0", "1"], "loop.keep": ["2", "3"]}}])
    {9: 'seed 1, before 0'}
    """
    turns = {}
    for line in history:
        settings = [(name, *pair) for name, pair in line["changed"].items() if not name.startswith(_NOT_OF_RESULTS)]
        if settings:
            turns[line["step"]] = "; ".join(f"{name} {new}, before {old}" for name, old, new in settings)
    return turns


def later_turns(history: History, step: int) -> str:
    """Describes the changes of settings at `step` or later, as in `turns_of`; empty if there are none.

    >>> later_turns([{"step": 9, "changed": {"seed": ["0", "1"]}}], 9)
    'from step 9: seed 1, before 0'
    """
    return ". ".join(f"from step {turn:,}: {text}" for turn, text in turns_of(history).items() if turn >= step)


def gaps_of(history: History) -> list[str]:
    """Lists, as text, the ranges of steps, first and last included, in which metrics are lost from metrics.jsonl.

    Where it is not known which are lost, the range is all steps up to the checkpoint.

    >>> gaps_of([{"step": 20, "metrics_missing": [11, 20]}])
    ['11 to 20']
    """
    return ["{:,} to {:,}".format(*line["metrics_missing"]) for line in history if "metrics_missing" in line]


def entries_of(history: History) -> dict[str, Any]:
    """The entries for summary.json: `changed` (`turns_of`) and `metrics_missing` (`gaps_of`), each if not empty."""
    turns, gaps = turns_of(history), gaps_of(history)
    changed = {"changed": {str(step): text for step, text in turns.items()}} if turns else {}
    return changed | ({"metrics_missing": gaps} if gaps else {})


def other_versions(history: History) -> Iterator[tuple[str, str, str]]:
    """Yields name, old and new version of each package, of Python and of the devices that changed on the last resume.

    They are in both of the last two lines, and differ. Yields nothing for fewer than two lines.
    """
    if len(history) < 2:
        return
    old, new = map(_versions, history[-2:])
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield name, old[name], new[name]


def _versions(line: Mapping[str, Any]) -> dict[str, str]:
    """The versions of packages and Python in a line of the history, by name, and its devices, as in "8 TPU v4"."""
    packages, devices = line.get("packages"), line.get("devices")
    versions = {name: str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    if isinstance(devices, list):
        versions["devices"] = ", ".join(f"{count} {kind}" for kind, count in Counter(map(str, devices)).items())
    return versions | ({"Python": str(line["python"])} if "python" in line else {})
