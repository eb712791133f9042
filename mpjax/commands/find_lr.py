"""Finds a learning rate by a few updates at growing rates: a suggestion, a plot and a JSON file."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

from mpjax import report, strict_json
from mpjax.commands.lacking import named_together
from mpjax.commands.parts import Parts, fresh_state, make_parts
from mpjax.config import Config, Duration, to_toml
from mpjax.config.commands import RateSearch
from mpjax.config.folders import check_new_folder, new_folder
from mpjax.config.limits import is_auto
from mpjax.config.user_code import PythonObject
from mpjax.files import write_atomically
from mpjax.training.range_test import Point, Suggestion, Watch, growing_rates, suggest
from mpjax.training.setup import pretrained_arrays


CHUNK = 10
"""Updates between two fetches of their losses, which wait for the device."""

MOST_SKIPPED = 50
"""Skipped steps in a row after which the search ends: dynamic loss scaling finds its scale in fewer."""


def find_rate(settings: RateSearch, config: Config) -> dict[str, Any]:
    """Trains at growing learning rates and prints the rate at which the loss falls fastest.

    It writes `find_lr.json` and the plot `find_lr.png` into a new folder, and no checkpoint.

    Returns:
      The output of `--json`: `suggestion` (None if the loss never falls), `reason`, `points`, `smoothed`, `skipped`,
        `ended`, `config`.

    Raises:
      UsageError: the settings are invalid, the data is missing, or the folder is not empty.
    """
    check_new_folder(config)  # before any slow work
    with named_together(config):
        if is_auto(config):
            from mpjax.commands.fit import fitted  # local, because few runs need the modules of the plan

            say = (lambda line: None) if settings.json else print
            config, fit = fitted(config, say=say)
            say(fit)
        parts = make_parts(with_growing_rates(config, settings))
    folder = new_folder(config, prefix="find_lr-")
    points, skipped, ended = _trained(settings, config, parts)
    found = suggest(points)

    result = {
        "suggestion": found.rate,
        "reason": found.reason,
        "ended": ended,
        "skipped": skipped,
        "points": [list(point) for point in points],
        "smoothed": list(found.smoothed),
        "config": to_toml(config),
    }
    write_atomically(folder / "find_lr.json", f"{strict_json.encode(result, indent=1)}\n".encode())
    for file in report.image_files(folder / "find_lr", config.report) if points else ():
        report.plot_rates(points, found.smoothed, found.rate, file, report.title_of(config))
    print(strict_json.encode(result) if settings.json else _text(settings, found, points, ended, folder))
    return result


def with_growing_rates(config: Config, settings: RateSearch) -> Config:
    """Replaces the schedule of a run by rates that grow from update to update."""
    rates = growing_rates(settings.lowest, settings.highest, settings.updates)

    def growing():
        return rates

    return dataclasses.replace(
        config,
        steps=Duration(settings.updates + MOST_SKIPPED),
        optimizer=dataclasses.replace(config.optimizer, schedule=PythonObject(growing), warmup=Duration(0)),
        training=dataclasses.replace(config.training, steps_per_call=1),
    )


def _trained(settings: RateSearch, config: Config, parts: Parts) -> tuple[list[Point], int, str]:
    """Runs the updates of the search.

    Returns:
      The updates with a finite loss, the number of skipped steps, and the reason why the search ended.
    """
    state = parts.packing.pack(fresh_state(config, parts, pretrained_arrays(parts.task, config.model)[0]))
    watch, points, skipped, in_a_row = Watch(settings.stop_above), [], 0, 0
    feed = parts.feed.calls(0, itertools.repeat(1))
    while len(points) < settings.updates:
        chunk = []
        for fed in itertools.islice(feed, min(CHUNK, settings.updates - len(points))):
            state, metrics = parts.train_call(state, fed, 1)
            chunk.append({name: metrics[name] for name in ("loss", "learning_rate", "finite")})
        for metrics in jax.device_get(chunk):
            if not math.isfinite(loss := float(metrics["loss"])):
                return points, skipped, "the loss was not finite"
            if not metrics["finite"]:
                skipped, in_a_row = skipped + 1, in_a_row + 1
                if in_a_row == MOST_SKIPPED:
                    return points, skipped, f"{in_a_row} steps in a row had gradients that are not finite"
                continue
            in_a_row = 0
            points.append(Point(float(metrics["learning_rate"]), loss))
            if watch.explodes(loss):
                return points, skipped, "the loss exploded"
    return points, skipped, "the highest rate was reached"


def _text(settings: RateSearch, found: Suggestion, points: Sequence[Point], ended: str, folder: object) -> str:
    last = f"; {ended} at {points[-1].rate:.2g}" if points else f"; {ended}"
    if found.rate is None:
        advice = "no suggestion: check the data, or try another range of rates"
        return f"{found.reason}{last}\n{advice}\nsee {folder}"
    lines = [f"{found.reason}{last}"]
    if found.rate <= 1.01 * settings.lowest:
        lines.append(f"this is the lowest rate that was tried: a lower --lowest than {settings.lowest:g} may be better")
    if found.lowest >= 0.99 * settings.highest:
        lines.append(f"the loss still falls at the highest rate: try a higher --highest than {settings.highest:g}")
    return "\n".join([*lines, f"suggested: --optimizer.learning_rate {found.rate:.2g}", f"see {folder}"])
