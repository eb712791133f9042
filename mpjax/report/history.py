"""Writes and reads history.jsonl, which records the settings, versions and devices of each stretch of a run.

A line describes a stretch: the steps that one process ran under one set of settings. A checkpoint holds the lines up to
it. A resumed run writes the file anew from these lines and a line of its own. So lost lines are restored, and lost
steps leave no line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax import strict_json
from mpjax.config.save import OF_ONE_COMMAND, changes
from mpjax.errors import UsageError
from mpjax.report.jsonl import read_metrics


HISTORY_FILE = "history.jsonl"

History = Sequence[Mapping[str, Any]]
"""The lines, in the order of their steps.

A line has `step` (the attempted steps before the stretch), `seconds_before` (the seconds of the run before the
stretch), `policy`, `changed` (the old and new text of each setting that changes here), and the content of
environment.json. If a run started without a history, its first line has `told_by` (the checkpoint) instead of the
environment. If metrics.jsonl has lost lines before the stretch, `metrics_missing` has their first and last step.
"""


def continued(
    before: Mapping[str, Any],
    step: int,
    about: Mapping[str, Any],
    environment: Mapping[str, Any],
    missing: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Extends the history of a run whose next steps run under the settings of `about`.

    The result is the lines of `before` whose stretches began before `step`, and a new line. Settings of one command
    (`OF_ONE_COMMAND`) do not count as changed.

    Args:
      before: the description of the checkpoint that the run resumes from; empty for a new run.
      step: the number of attempted steps so far.
      about: the description of future checkpoints: `policy`, and `config` as TOML.
      environment: the content of environment.json.
      missing: the first and the last step that metrics.jsonl lacks; None if it lacks none.
    """
    changed = changes(before["config"], about["config"], apart_from=OF_ONE_COMMAND) if before else ()
    line = {
        "step": step,
        "seconds_before": float(before.get("seconds", 0.0)),
        "policy": about["policy"],
        "changed": {name: [old, new] for name, old, new in changed},
        **({"metrics_missing": list(missing)} if missing else {}),
        **environment,
    }
    return [*(earlier for earlier in history_in(before, step) if earlier["step"] < step), line] if before else [line]


def history_in(about: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """The history in the description of the checkpoint of `step`; if there is none, one line from 0 with its policy."""
    known = about.get("history")
    if isinstance(known, list) and known and all(map(_is_line, known)):
        return known
    line = {"step": 0, "seconds_before": 0.0, "policy": str(about["policy"]), "changed": {}}
    return [line | {"told_by": f"the checkpoint of step {step}"}]


def begins(history: History, about: Mapping[str, Any]) -> bool:
    """True if `history` begins with the history in the description of a checkpoint; False if that has none."""
    known = about.get("history")
    return isinstance(known, list) and bool(known) and known == list(history[: len(known)])


def lines_of(history: History) -> bytes:
    """Encodes a history as the content of history.jsonl."""
    return b"".join(strict_json.encode(line).encode() + b"\n" for line in history)


def read_history(path: Path) -> History:
    """Reads a history.jsonl, without an incomplete last line. A missing file, as in old runs, is an empty history.

    Raises:
      UsageError: a line is damaged.
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
    """True if a line has the fields that its readers need, of the right types."""
    if not (isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("policy"), str)):
        return False
    changed, missing = line.get("changed"), line.get("metrics_missing", [0, 0])
    settings = changed.values() if isinstance(changed, dict) else [None]
    return all(_is_pair(pair, str) for pair in settings) and _is_pair(missing, int)


def _is_pair(value: Any, kind: type) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, kind) for item in value)


def policies_of(history: History, policy: str = "") -> str:
    """Describes the policies of a run over its steps, or returns `policy` without a history.

    >>> policies_of([{"step": 0, "policy": "float32"}, {"step": 9, "policy": "float16"}])
    'float32 to step 9, then float16'
    """
    return _over_steps([(line["step"], line["policy"]) for line in history]) or policy


def changed_settings(history: History) -> dict[str, str]:
    """Describes each changed setting by its values over the steps.

    >>> changed_settings([{"step": 9, "changed": {"seed": ["0", "1"]}}, {"step": 20, "changed": {"seed": ["1", "0"]}}])
    {'seed': '0 to step 9, then 1 to step 20, then 0'}
    """
    values: dict[str, list[tuple[int, str]]] = {}
    for line in history:
        for name, (old, new) in line["changed"].items():
            values.setdefault(name, [(0, old)]).append((line["step"], new))
    return {name: _over_steps(pairs) for name, pairs in values.items()}


def _over_steps(values: Sequence[tuple[int, str]]) -> str:
    """Joins values with the steps at which they end. Equal neighbours are merged."""
    kept = [pair for index, pair in enumerate(values) if index == 0 or pair[1] != values[index - 1][1]]
    ends = [f" to step {step:,}" for step, _ in kept[1:]]
    return ", then ".join(value + end for (_, value), end in zip(kept, [*ends, ""], strict=True)) if kept else ""


_NOT_OF_RESULTS = ("loop.", "report.", "data.data_dir")
"""Prefixes of settings that only control when and where files are written."""


def turns_of(history: History) -> dict[int, str]:
    """Describes the changes of settings that affect results (all but `_NOT_OF_RESULTS`), by step.

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
    """Describes the changes of settings from step `step` on, or returns an empty string.

    >>> later_turns([{"step": 9, "changed": {"seed": ["0", "1"]}}], 9)
    'from step 9: seed 1, before 0'
    """
    return ". ".join(f"from step {turn:,}: {text}" for turn, text in turns_of(history).items() if turn >= step)


def gaps_of(history: History) -> list[str]:
    """Lists the ranges of steps that metrics.jsonl lacks.

    >>> gaps_of([{"step": 20, "metrics_missing": [11, 20]}])
    ['11 to 20']
    """
    return ["{:,} to {:,}".format(*line["metrics_missing"]) for line in history if "metrics_missing" in line]


def entries_of(history: History) -> dict[str, Any]:
    """The entries of a history in summary.json: `changed` by step and `metrics_missing`, each if there are any."""
    turns, gaps = turns_of(history), gaps_of(history)
    changed = {"changed": {str(step): text for step, text in turns.items()}} if turns else {}
    return changed | ({"metrics_missing": gaps} if gaps else {})


def other_versions(history: History) -> Iterator[tuple[str, str, str]]:
    """Yields name, old and new version of packages, Python and devices that are in both last lines and differ."""
    if len(history) < 2:
        return
    old, new = map(_versions, history[-2:])
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield name, old[name], new[name]


def _versions(line: Mapping[str, Any]) -> dict[str, str]:
    packages, devices = line.get("packages"), line.get("devices")
    versions = {name: str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    if isinstance(devices, list):
        versions["devices"] = ", ".join(f"{count} {kind}" for kind, count in Counter(map(str, devices)).items())
    return versions | ({"Python": str(line["python"])} if "python" in line else {})
