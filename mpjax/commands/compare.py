"""Compares runs by their folders: a table and a plot of the step at which their curves diverge."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpjax import strict_json
from mpjax.config.commands import Compare
from mpjax.config.durations import Duration
from mpjax.config.folders import require_no_links, seed_folder, seeds_in
from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.paths import expanded
from mpjax.config.program import typed
from mpjax.errors import UsageError, printable
from mpjax.report import comparison_view
from mpjax.report.comparison import Comparison, Contrast, Group, compare_groups
from mpjax.report.history import HISTORY_FILE, changed_settings, read_history
from mpjax.report.jsonl import read_metrics
from mpjax.report.wording import short_name, subject_of


METRICS_FILE = "metrics.jsonl"

IRRELEVANT = ("seed", "output_dir", "resume", "cache_dir", "data.data_dir", "loop.keep", "loop.save_every", "report.")
"""Prefixes of the settings in which runs of one group may differ: the seed, and the settings of storage."""


class ComparedRun(NamedTuple):
    """A run to compare.

    Attributes:
      folder: its folder, as the user wrote it.
      subject: its model and data in words.
      seed: its seed.
      settings: its settings as text by name, without `IRRELEVANT`. If a setting changed when the run was resumed, the
        text has all values and their steps.
      records: the lines of its metrics.jsonl.
    """

    folder: str
    subject: str
    seed: int
    settings: dict[str, Any]
    records: list[dict[str, Any]]


def compare_runs(settings: Compare) -> dict[str, Any]:
    """Compares groups of runs that differ only in the seed, prints the result, and draws the curves to `settings.plot`.

    A plot that exists is replaced, with a note on stderr; an empty `settings.plot` means none. A folder of `--seeds`
    stands for its runs. Every group is compared with the first.

    Returns:
      The output of `--json`: `groups`, `comparisons` and `evidence`. `comparisons` has, for each group except the
        first, the final and best values of each metric, and `parts_at`: the first step from which the metric stays
        apart from the first group (None if it does not). `evidence` has sentences on the strength of the evidence.
        Numbers that are not finite are strings.

    Raises:
      UsageError: the settings are invalid, a folder has no run or is given twice, there are fewer than two runs, a
        group lacks a seed, or a run a metric. Or the runs differ in `data.name` or `data.test_split`, or only in the
        seed and in settings of storage (`IRRELEVANT`).
      OSError: the plot cannot be written; the message names the file.
    """
    settings.check()
    folders = [run for folder in settings.runs for run in _runs_in(folder)]
    if len(folders) < 2:
        raise UsageError(f"1 run to compare, {folders[0]}: wanted the folders of two or more")
    runs = [_read(folder) for folder in _distinct(folders)]
    _require_one_task(runs)
    groups = _grouped(runs, settings.seeds)
    comparisons_by_group = [
        [
            compare_groups(
                metric,
                groups[0],
                other,
                band=settings.band,
                tolerance=settings.tolerance,
                smoothing=settings.smoothing,
            )
            for metric in settings.metrics
        ]
        for other in groups[1:]
    ]
    says = [
        comparison_view.evidence(groups[0], other, comparisons, band=settings.band, tolerance=settings.tolerance)
        for other, comparisons in zip(groups[1:], comparisons_by_group, strict=True)
    ]
    result = strict_json.spelled(
        {
            "groups": [_described(g, runs) for g in groups],
            "comparisons": [_results(f) for f in comparisons_by_group],
            "evidence": says,
        }
    )
    names = [f"{comparison_view.letter(i)}: {group.name}" for i, group in enumerate(groups)]
    if settings.plot:
        replaced = expanded(settings.plot).exists()
        labels = [f"{name} ({_count(group)})" for name, group in zip(names, groups, strict=True)]
        comparison_view.plot_comparison(
            labels, comparisons_by_group, expanded(settings.plot), _title(runs), band=settings.band
        )
        if replaced:
            print(printable(f"note: {settings.plot} was replaced; write another --plot to keep both"), file=sys.stderr)
    if settings.json:
        print(strict_json.encode(result))
    else:
        _print(settings, names, groups, comparisons_by_group, says)
    return result


def _runs_in(folder: str) -> list[str]:
    """The folders `seed_N` of the runs in a folder of `--seeds`, by seed; any other folder alone."""
    return [str(pathlib.Path(folder) / seed_folder(seed)) for seed in seeds_in(expanded(folder))] or [folder]


def _read(folder: str) -> ComparedRun:
    path = expanded(folder)
    for file in (CONFIG_FILE, METRICS_FILE):
        if not (path / file).is_file():
            raise UsageError(f"no run in {path} (no {file}); wanted the folder that {typed('train')} printed")
    require_no_links(path)
    config = from_toml(path / CONFIG_FILE)
    settings = _with_changes(dict(_flat(config)), changed_settings(read_history(path / HISTORY_FILE)))
    return ComparedRun(folder, subject_of(config), config.seed, settings, read_metrics(path / METRICS_FILE))


def _with_changes(settings: dict[str, Any], changed: Mapping[str, str]) -> dict[str, Any]:
    """Replaces the text of each setting that changed at a resumption by the text of all its values, from `changed`.

    If one entry of a dict changed, such as a rule, its text is appended to that of the whole dict. A changed `seed` is
    added. Other settings that `settings` lacks are left out.
    """
    told = dict(settings)
    for name, values in changed.items():
        if name in settings:
            told[name] = values
        elif owner := next((key for key in settings if name.startswith(f"{key}.")), ""):
            told[owner] = f"{told[owner]} ({name.removeprefix(f'{owner}.')}: {values})"
        elif name == "seed":
            told[name] = values
    return told


def _flat(section: Any, prefix: str = ""):
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration):
            yield from _flat(value, f"{name}.")
        elif not name.startswith(IRRELEVANT):
            yield name, str(value)


def _distinct(folders: Sequence[str]) -> Sequence[str]:
    resolved = [expanded(folder).resolve() for folder in folders]
    twice = next((folder for i, folder in enumerate(folders) if resolved[i] in resolved[:i]), None)
    if twice is not None:
        raise UsageError(f"{twice} is given twice: wanted different runs")
    return folders


def _require_one_task(runs: Sequence[ComparedRun]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for name in ("data.name", "data.test_split"):
            if run.settings[name] != first.settings[name]:
                raise UsageError(
                    f"runs of different tasks: {name} is {first.settings[name]} in {first.folder} and "
                    f"{run.settings[name]} in {run.folder}"
                )


def _grouped(runs: Sequence[ComparedRun], seeds: Sequence[int]) -> list[Group]:
    """Groups runs by all settings except the seed, in the order of their first runs.

    The name of a group has the settings that differ between groups, as `name=value, ...`. `seeds` are the seeds to keep
    in each group; empty: all.

    Raises:
      UsageError: there is only one group, or a group has no run of one of `seeds`.
    """
    members: dict[tuple, list[ComparedRun]] = {}
    for run in runs:
        members.setdefault(tuple(run.settings.items()), []).append(run)
    if len(members) < 2:
        raise UsageError(
            "all runs have the same settings but for the seed: that is one group; wanted runs of two or more, as of "
            "--precision.policy float32 and mixed_float16"
        )
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differing = [name for name in names if len({dict(key).get(name) for key in members}) > 1]
    groups = []
    for key, group_runs in members.items():
        of_group = dict(key)  # without a seed, unless it changed
        name = ", ".join(f"{name}={of_group[name]}" for name in differing if name in of_group)
        for seed in seeds:
            if seed not in [run.seed for run in group_runs]:
                has = ", ".join(str(run.seed) for run in group_runs)
                raise UsageError(f"--seeds: no run of seed {seed} with {name}: it has {has}")
        kept = {run.folder: run.records for run in group_runs if not seeds or run.seed in seeds}
        groups.append(Group(name, kept))
    return groups


def _title(runs: Sequence[ComparedRun]) -> str:
    """The title of the plot: the model and data of the runs in words, or only the data if these differ."""
    subjects = {run.subject for run in runs}
    return subjects.pop() if len(subjects) == 1 else short_name(runs[0].settings["data.name"])


def _count(group: Group) -> str:
    return "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs"


def _described(group: Group, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    members = [run for run in runs if run.folder in group.runs]
    return {"name": group.name, "seeds": [run.seed for run in members], "runs": [run.folder for run in members]}


def _results(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    return {
        comparison.metric: {
            "final": _contrast(comparison.final),
            "best": comparison.best and _contrast(comparison.best),
            "parts_at": comparison.parts_at,
            "by_design": comparison.by_design,
            "points_apart": comparison.apart,
            "points": len(comparison.steps),
            "last_step": comparison.steps[-1],
            "averaged_over": comparison.window,
        }
        for comparison in comparisons
    }


def _contrast(contrast: Contrast) -> dict[str, Any]:
    return {
        "reference": contrast.reference._asdict() | contrast.seeds[0]._asdict(),
        "other": contrast.other._asdict() | contrast.seeds[1]._asdict(),
        "difference": contrast.difference,
        "bands": contrast.bands,
    }


def _print(settings: Compare, names: Sequence[str], groups: Sequence[Group], results, says) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)

    def say(text: str) -> None:
        console.print(printable(text), markup=False, emoji=False, soft_wrap=True)

    for name, group in zip(names, groups, strict=True):
        say(f"{name}  ({', '.join(group.runs)})")
    for i, (comparisons, sentences) in enumerate(zip(results, says, strict=True), start=1):
        console.print(
            comparison_view.comparison_table((comparison_view.letter(0), comparison_view.letter(i)), comparisons)
        )
        for sentence in sentences:
            say(sentence)
    if settings.plot:
        say(f"plot: {settings.plot}")
