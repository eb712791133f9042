"""Writes and reads history.jsonl: which steps of a run ran under which settings, versions and devices.

A line is of a stretch: the steps that one process ran under one set of settings. Checkpoints hold the lines up to them,
so that a resumed run writes the file anew from those, with a line of its own: lost lines come back, and steps that were
lost leave none.
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

A line has `step` (the attempted steps before the stretch), `seconds_before` (of the run, before the stretch), `policy`,
`changed` (old and new text of each setting that has another value from here on), and the content of environment.json.
The first line of a run that began without a history has `told_by` in place of that content. A line after which
metrics.jsonl had lost lines has `metrics_missing`, the first and the last of their steps.
"""


def continued(
    before: Mapping[str, Any],
    step: int,
    about: Mapping[str, Any],
    environment: Mapping[str, Any],
    missing: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Returns the history of a run whose next steps run under the settings of `about`.

    Args:
      before: the description of the checkpoint from which the run goes on; empty: it begins.
      step: the attempted steps so far.
      about: the description of the checkpoints to come: `policy`, and `config` as TOML.
      environment: what environment.json has.
      missing: the first and the last step that metrics.jsonl lacks.
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
    """Returns the history in the description of a checkpoint; one that has none tells the settings of its own steps."""
    known = about.get("history")
    if isinstance(known, list) and known and all(map(_is_line, known)):
        return known
    line = {"step": 0, "seconds_before": 0.0, "policy": str(about["policy"]), "changed": {}}
    return [line | {"told_by": f"the checkpoint of step {step}"}]


def begins(history: History, about: Mapping[str, Any]) -> bool:
    """Returns True if a checkpoint of this description was written on the way that a history tells."""
    known = about.get("history")
    return isinstance(known, list) and bool(known) and known == list(history[: len(known)])


def lines_of(history: History) -> bytes:
    """Returns the content of history.jsonl."""
    return b"".join(strict_json.encode(line).encode() + b"\n" for line in history)


def read_history(path: Path) -> History:
    """Reads a history.jsonl; a run of before there was one has none. Leaves out an incomplete last line.

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
    """Returns True if a line has what its readers need."""
    if not (isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("policy"), str)):
        return False
    changed, missing = line.get("changed"), line.get("metrics_missing", [0, 0])
    settings = changed.values() if isinstance(changed, dict) else [None]
    return all(_is_pair(pair, str) for pair in settings) and _is_pair(missing, int)


def _is_pair(value: Any, kind: type) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, kind) for each in value)


def policies_of(history: History, policy: str = "") -> str:
    """Returns the policies of a run; without a history `policy`.

    >>> policies_of([{"step": 0, "policy": "float32"}, {"step": 9, "policy": "float16"}])
    'float32 to step 9, then float16'
    """
    return _over_steps([(line["step"], line["policy"]) for line in history]) or policy


def changed_settings(history: History) -> dict[str, str]:
    """Returns each setting that has changed, with its values in turn.

    >>> changed_settings([{"step": 9, "changed": {"seed": ["0", "1"]}}, {"step": 20, "changed": {"seed": ["1", "0"]}}])
    {'seed': '0 to step 9, then 1 to step 20, then 0'}
    """
    values: dict[str, list[tuple[int, str]]] = {}
    for line in history:
        for name, (old, new) in line["changed"].items():
            values.setdefault(name, [(0, old)]).append((line["step"], new))
    return {name: _over_steps(found) for name, found in values.items()}


def _over_steps(values: Sequence[tuple[int, str]]) -> str:
    """Returns values and the steps up to which they held; equal neighbours are one."""
    kept = [pair for index, pair in enumerate(values) if index == 0 or pair[1] != values[index - 1][1]]
    ends = [f" to step {step:,}" for step, _ in kept[1:]]
    return ", then ".join(value + end for (_, value), end in zip(kept, [*ends, ""], strict=True)) if kept else ""


_NOT_OF_RESULTS = ("loop.", "report.", "data.data_dir")
"""Settings that say when and where something is written."""


def turns_of(history: History) -> dict[int, str]:
    """Returns what changed at a step, for those steps from which on other settings decided the results.

    >>> turns_of([{"step": 9, "changed": {"seed": ["0", "1"], "loop.keep": ["2", "3"]}}])
    {9: 'seed 1, before 0'}
    """
    found = {}
    for line in history:
        settings = [(name, *pair) for name, pair in line["changed"].items() if not name.startswith(_NOT_OF_RESULTS)]
        if settings:
            found[line["step"]] = "; ".join(f"{name} {new}, before {old}" for name, old, new in settings)
    return found


def later_turns(history: History, step: int) -> str:
    """Returns in which settings the last steps of a run differ from step number `step`; empty if they do not.

    >>> later_turns([{"step": 9, "changed": {"seed": ["0", "1"]}}], 9)
    'from step 9: seed 1, before 0'
    """
    return ". ".join(f"from step {turn:,}: {text}" for turn, text in turns_of(history).items() if turn >= step)


def gaps_of(history: History) -> list[str]:
    """Returns the steps that metrics.jsonl lacks.

    >>> gaps_of([{"step": 20, "metrics_missing": [11, 20]}])
    ['11 to 20']
    """
    return ["{:,} to {:,}".format(*line["metrics_missing"]) for line in history if "metrics_missing" in line]


def entries_of(history: History) -> dict[str, Any]:
    """Returns what summary.json has of a history: `changed` by step, and `metrics_missing`, if there are any."""
    turns, gaps = turns_of(history), gaps_of(history)
    changed = {"changed": {str(step): text for step, text in turns.items()}} if turns else {}
    return changed | ({"metrics_missing": gaps} if gaps else {})


def other_versions(history: History) -> Iterator[tuple[str, str, str]]:
    """Yields the name, old and new version of packages, Python and devices that differ in the last two lines."""
    if len(history) < 2:
        return
    old, new = map(_versions, history[-2:])
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield name, old[name], new[name]


def _versions(line: Mapping[str, Any]) -> dict[str, str]:
    packages, devices = line.get("packages"), line.get("devices")
    found = {name: str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    if isinstance(devices, list):
        found["devices"] = ", ".join(f"{count} {kind}" for kind, count in Counter(map(str, devices)).items())
    return found | ({"Python": str(line["python"])} if "python" in line else {})
