"""Trains one run for each of several seeds: settings in; a folder for each, mean and spread of the results out."""

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mpjax import report
from mpjax.commands.train import run
from mpjax.config import Config
from mpjax.config.folders import run_folder
from mpjax.config.limits import check
from mpjax.config.load import CONFIG_FILE
from mpjax.config.schema import Distributed
from mpjax.errors import Diverged, UsageError
from mpjax.report.wording import number


def train(config: Config) -> dict:
    """Trains the run that `config` describes, or one for each of its `seeds`.

    Raises:
      UsageError: as `run` and `sweep`.
      Diverged: as `run` and `sweep`.
    """
    return sweep(config) if config.seeds else run(config)


def sweep(config: Config) -> dict:
    """Trains a run for each of `config.seeds`, in `seed_N` of its folder, one after the other.

    With `resume`, runs that have begun go on, and the others begin. A run that diverges does not stop the others.

    Returns:
      What `summary.json` holds: `seeds`, and of each metric `mean`, `std` (of a sample), `lowest` and `highest`.

    Raises:
      UsageError: a seed is given twice, or there are several processes; or as `run`.
      Diverged: runs of some seeds diverged; the message names them.
    """
    if twice := sorted({seed for seed in config.seeds if config.seeds.count(seed) > 1}):
        raise UsageError(f"--seeds has {twice[0]} twice: wanted different seeds")
    check(config)
    if config.distributed != Distributed():
        raise UsageError("--seeds trains in one process: start one run of several processes for each --seed")
    folder = run_folder(config)
    summaries: dict[int, Mapping[str, Any]] = {}
    diverged: dict[int, str] = {}
    for seed in config.seeds:
        own = folder / f"seed_{seed}"
        begun = (own / CONFIG_FILE).exists()
        print(f"seed {seed} ({len(summaries) + len(diverged) + 1} of {len(config.seeds)})", flush=True)
        try:
            summaries[seed] = run(dataclasses.replace(config, seed=seed, seeds=(), output_dir=str(own), resume=begun))
        except Diverged as error:
            diverged[seed] = str(error).splitlines()[0]
            print(f"seed {seed}: {error}", flush=True)
    result = summarised(summaries)
    report.write_summary(folder / "summary.json", result)
    print(table(result, folder))
    if diverged:
        said = "; ".join(f"seed {seed}: {text}" for seed, text in diverged.items())
        raise Diverged(f"{len(diverged)} of {len(config.seeds)} runs diverged: {said}")
    return result


def summarised(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns mean and spread of the metrics that the summaries of all seeds have.

    >>> summarised({0: {"test/loss": 1.0}, 1: {"test/loss": 3.0}})["test/loss"]
    {'mean': 2.0, 'std': 1.4142135623730951, 'lowest': 1.0, 'highest': 3.0}
    """
    names = [
        name for name in next(iter(summaries.values()), {}) if name.startswith(("train/", "test/", "ema/", "best/t"))
    ]
    shared = [name for name in names if all(name in summary for summary in summaries.values())]
    spread = {name: _spread([float(summary[name]) for summary in summaries.values()]) for name in shared}
    return {"seeds": list(summaries), **spread}


def _spread(values: Sequence[float]) -> dict[str, float]:
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": std, "lowest": min(values), "highest": max(values)}


def table(result: Mapping[str, Any], folder: pathlib.Path) -> str:
    """Formats mean and spread of the test metrics as aligned lines."""
    count = len(result["seeds"])
    rows = [("seeds", " ".join(map(str, result["seeds"])) or "none")]
    for name, spread in result.items():
        if name.startswith(("test/", "ema/", "best/")):
            low, high = number(spread["lowest"]), number(spread["highest"])
            text = f"{number(spread['mean'])} +- {number(spread['std'])}  ({low} to {high}, {count} seeds)"
            rows.append((name.replace("/", " "), text))
    rows.append(("folder", str(folder)))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
