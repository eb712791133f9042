"""Trains one run for each of several seeds, each in its own folder, and reports mean and spread of the results."""

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpjax.config.folders import check_run_folder, resume_command, run_folder, run_settings, seed_folder, seeds_in
from mpjax.config.limits import check, is_auto, require_types
from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.save import changes, to_toml
from mpjax.config.schema import Config, Distributed
from mpjax.errors import Diverged, Interrupted, UsageError, printable
from mpjax.files import write_atomically
from mpjax.report.curves import plot_seeds
from mpjax.report.figure import image_files
from mpjax.report.jsonl import read_metrics
from mpjax.report.results import write_summary
from mpjax.report.wording import number, title_of


def sweep(config: Config, run: Callable[[Config], Mapping[str, Any]]) -> dict:
    """Trains a run for each of `config.seeds`, in `seed_N` of its folder, one after the other, and prints a table.

    It writes `summary.json` and the plot `seeds.png` (or other formats) with the curves of all runs. With `resume`,
    started runs continue, and the others start; the seeds that the folder or its config.toml already has are trained
    too. A run that diverges does not stop the others: the error comes at the end.

    Args:
      config: the settings that all runs share.
      run: `mpjax.run`, which trains one of them and returns its summary.

    Returns:
      The contents of `summary.json`: `seeds` (of the runs that did not diverge), and of each metric `mean`, `std` (of a
        sample; None for one run), `lowest` and `highest`. It has a `warning` if runs have different numbers of steps,
        or differ in settings that changed when they were resumed.

    Raises:
      UsageError: a seed is given twice, there are several processes, or a started run has other settings; or as `run`.
      Diverged: runs of some seeds diverged; the message names them.
      CallbackError, Interrupted: as `run`; the seeds that are left are not trained.
    """
    require_types(config)
    if twice := sorted({seed for seed in config.seeds if config.seeds.count(seed) > 1}):
        raise UsageError(f"--seeds has {twice[0]} twice: wanted different seeds")
    if config.distributed != Distributed():
        raise UsageError("--seeds trains in one process: start one run of several processes for each --seed")
    folder = check_run_folder(config)  # before any slow work
    if config.resume:
        config = _joined(config, folder)
    config = _settled(config)
    check(config)
    folder = run_folder(config)
    with _config_written(config, folder) as begin:
        summaries, diverged = _trained(config, folder, run, begin)
    result = summarised(summaries)
    metrics = {seed: folder / seed_folder(seed) / "metrics.jsonl" for seed in config.seeds}
    records = {seed: read_metrics(file) for seed, file in metrics.items() if file.exists()}
    for file in image_files(folder / "seeds", config.report):
        plot_seeds(records, file, title_of(config))
    write_summary(folder / "summary.json", result)
    print(table(result, folder))
    if diverged:
        reasons = "; ".join(f"seed {seed}: {text}" for seed, text in diverged.items())
        raise Diverged(f"{len(diverged)} of {len(config.seeds)} runs diverged: {reasons}")
    return result


def _settled(config: Config) -> Config:
    """Replaces a batch size or a number of micro-batches that is `auto` by a number, which all seeds then share."""
    if is_auto(config):
        from mpjax.commands.fit import fitted  # local, because few runs need the modules of the plan

        config, message = fitted(config)
        print(message)
    return config


def _joined(config: Config, folder: pathlib.Path) -> Config:
    """Sets the seeds of a resumed sweep: those of its config.toml, then of started runs, then of `config`.

    Raises:
      UsageError: a run has started with settings that change its results.
    """
    stored, started = from_toml(folder / CONFIG_FILE), seeds_in(folder)
    for seed in started:
        path = folder / seed_folder(seed)
        before = to_toml(from_toml(path / CONFIG_FILE))
        if differences := list(changes(before, to_toml(dataclasses.replace(config, seed=seed)))):
            detail = "; ".join(f"{name} {new}, before {old}" for name, old, new in differences)
            raise UsageError(
                f"--resume with settings that {path} has not: {detail}; a mean would be of different runs; write "
                f"another --output_dir for a new sweep, or resume that run alone: --output_dir {path}"
            )
    return dataclasses.replace(config, seeds=tuple(dict.fromkeys((*stored.seeds, *started, *config.seeds))))


@contextlib.contextmanager
def _config_written(config: Config, folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Context that writes the config.toml of a sweep, and undoes that after a UsageError before the first run begins.

    The old file is restored; of a new sweep, the file is removed, and the folder if it is empty. The context yields a
    function to call once a run has begun; after that call, nothing is undone. The settings are stored before the first
    run, because a sweep may be killed at any time.
    """
    file = folder / CONFIG_FILE
    before = file.read_bytes()
    calls = []
    try:
        write_atomically(file, run_settings(config, folder).encode())
        yield lambda: calls.append(True)
    except UsageError:
        if not calls and config.resume:
            write_atomically(file, before)
        elif not calls:
            file.unlink()
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        raise


def _trained(
    config: Config, folder: pathlib.Path, run: Callable[[Config], Mapping[str, Any]], begin: Callable[[], None]
) -> tuple[dict[int, Mapping[str, Any]], dict[int, str]]:
    """Trains a run for each seed, in order, and calls `begin` once the first has begun.

    Returns:
      The summaries of the runs that did not diverge, and the first line of the error of each run that did, both by
        seed.

    Raises:
      UsageError: as `run`, for the first seed that raises it.
      Interrupted: as `run`; the message has the command that resumes the sweep.
    """
    summaries: dict[int, Mapping[str, Any]] = {}
    diverged: dict[int, str] = {}
    for seed in config.seeds:
        path = folder / seed_folder(seed)
        alone = dataclasses.replace(config, seed=seed, seeds=(), output_dir=str(path), resume=seed in seeds_in(folder))
        print(f"seed {seed} ({len(summaries) + len(diverged) + 1} of {len(config.seeds)})", flush=True)
        try:
            summaries[seed] = run(alone)
        except Diverged as error:
            diverged[seed] = str(error).splitlines()[0]
            print(printable(f"seed {seed}: {error}"), flush=True)
        except Interrupted as error:
            message, *_ = str(error).splitlines()  # the second line resumes only the run of this seed
            line = resume_command(config, folder)
            raise Interrupted(f"seed {seed}: {message}\n{line}".rstrip(), error.signal_number) from error
        except UsageError:
            file = path / CONFIG_FILE
            # A run whose file has these settings ran steps with them.
            if file.exists() and file.read_text(encoding="utf-8") == run_settings(alone, path):
                begin()
            raise
        begin()
    return summaries, diverged


def summarised(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Computes mean, standard deviation, lowest and highest value of each metric that all summaries have.

    `summaries` are by seed. Metrics are the entries `train/…`, `test/…`, `ema/…` and `best/test…`. The result also has
    `seeds`, and a `warning` if the runs differ in their numbers of steps or in changes of their settings. `std` is None
    for one run.

    >>> summarised({0: {"test/loss": 1.0}, 1: {"test/loss": 3.0}})["test/loss"]
    {'mean': 2.0, 'std': 1.4142135623730951, 'lowest': 1.0, 'highest': 3.0}
    """
    names = [
        name for name in next(iter(summaries.values()), {}) if name.startswith(("train/", "test/", "ema/", "best/t"))
    ]
    shared = [name for name in names if all(name in summary for summary in summaries.values())]
    spread = {name: _spread([float(summary[name]) for summary in summaries.values()]) for name in shared}
    lengths = {seed: summary["attempts"] for seed, summary in summaries.items() if "attempts" in summary}
    changed = {seed: _changes_of(summary) for seed, summary in summaries.items()}
    warnings = []
    if len(set(lengths.values())) > 1:
        detail = ", ".join(f"seed {seed} has {length}" for seed, length in lengths.items())
        warnings.append(f"the runs differ in their steps: {detail}")
    if len(set(changed.values())) > 1:
        detail = ", ".join(f"seed {seed} {text}" for seed, text in changed.items() if text)
        warnings.append(f"the runs differ in settings that changed on the way: {detail}")
    return {"seeds": list(summaries), **({"warning": "; ".join(warnings)} if warnings else {}), **spread}


def _changes_of(summary: Mapping[str, Any]) -> str:
    """Formats the settings that changed when a run was resumed, by step, except `steps`; empty if there are none."""
    changed = {
        step: "; ".join(setting for setting in text.split("; ") if not setting.startswith("steps "))
        for step, text in summary.get("changed", {}).items()
    }
    return ", ".join(f"from step {step} ({text})" for step, text in changed.items() if text)


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "lowest": min(values), "highest": max(values)}


def table(result: Mapping[str, Any], folder: pathlib.Path) -> str:
    """Formats a result of `summarised` as aligned lines: seeds, warning, metrics of the test set, and folder."""
    count = len(result["seeds"])
    rows = [("seeds", " ".join(map(str, result["seeds"])) or "none")]
    if "warning" in result:
        rows.append(("warning", result["warning"]))
    for name, spread in result.items():
        if name.startswith(("test/", "ema/", "best/")):
            low, high = number(spread["lowest"]), number(spread["highest"])
            text = number(spread["mean"])
            if spread["std"] is None:
                text += "  (1 seed: its spread is not known)"
            else:
                text += f" +- {number(spread['std'])}  ({low} to {high}, {count} seeds)"
            rows.append((name.replace("/", " "), text))
    rows.append(("folder", str(folder)))
    width = max(len(label) for label, _ in rows)
    return printable("\n".join(f"{label:<{width}}  {text}" for label, text in rows))
