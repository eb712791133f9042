"""Finds a learning rate by a few updates at growing rates: a suggestion, a plot and a JSON file."""

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpjax import strict_json
from mpjax.commands.build import Run, build_run, fresh_state
from mpjax.config.commands import RateSearch
from mpjax.config.durations import Duration
from mpjax.config.folders import check_new_folder, new_folder
from mpjax.config.limits import is_auto
from mpjax.config.save import to_toml
from mpjax.config.schema import Config, with_settings
from mpjax.config.user_code import PythonObject
from mpjax.errors import UsageError
from mpjax.files import write_atomically
from mpjax.report.figure import BLUE, GREY, VERMILION, dress, image_files, legend_above, new_figure, save_figure
from mpjax.report.wording import title_of
from mpjax.training.range_test import Point, Suggestion, Watch, growing_rates, suggest
from mpjax.training.setup import pretrained_arrays


CHUNK = 10
"""Updates between two fetches of their losses, which wait for the device."""

MOST_SKIPPED = 50
"""Skipped steps in a row after which the search ends: dynamic loss scaling finds its scale in fewer."""


def find_rate(settings: RateSearch, config: Config) -> dict[str, Any]:
    """Trains at growing learning rates and prints the rate at which the loss falls fastest.

    It writes `find_lr.json` into a new folder, and no checkpoint. If `config.report.plot` is set and an update had a
    finite loss, it also plots the losses: `find_lr.png`, or the formats of `config.report.plot_format`.

    Returns:
      The output of `--json`: `suggestion` (the rate; None if the loss never falls), `reason`, `points` (a list of
        [rate, loss] of each applied update), `smoothed` (the smoothed loss of each), `skipped` (the number of skipped
        steps), `ended` (why the search ended) and `config` (the settings as TOML).

    Raises:
      UsageError: the settings are invalid, the data is missing, or the folder is not empty. The message also names the
        errors that would follow (`raise_together`).
      OSError: a file cannot be written; the message names the file.
    """
    check_new_folder(config)  # before any slow work
    try:
        if is_auto(config):
            from mpjax.commands.fit import fitted  # local, because few runs need the modules of the plan

            say = (lambda line: None) if settings.json else print
            config, fit = fitted(config, say=say)
            say(fit)
        run = build_run(with_growing_rates(config, settings))
    except UsageError as error:
        from mpjax.commands.lacking import raise_together  # local, because few runs need it

        raise_together(error, config)
    folder = new_folder(config, prefix="find_lr-")
    points, skipped, ended = _trained(settings, run)
    suggestion = suggest(points)

    result = {
        "suggestion": suggestion.rate,
        "reason": suggestion.reason,
        "ended": ended,
        "skipped": skipped,
        "points": [list(point) for point in points],
        "smoothed": list(suggestion.smoothed),
        "config": to_toml(config),
    }
    write_atomically(folder / "find_lr.json", f"{strict_json.encode(result, indent=1)}\n".encode())
    for file in image_files(folder / "find_lr", config.report) if points else ():
        plot_rates(points, suggestion.smoothed, suggestion.rate, file, title_of(config))
    print(strict_json.encode(result) if settings.json else _text(settings, suggestion, points, ended, folder))
    return result


def with_growing_rates(config: Config, settings: RateSearch) -> Config:
    """Replaces the schedule of a run by rates that grow by equal factors from update to update, without warm-up.

    It also sets the length of the run to the updates and `MOST_SKIPPED` more steps, and the steps per call to 1.
    """
    rates = growing_rates(settings.lowest, settings.highest, settings.updates)

    def growing():
        return rates

    growth = {"optimizer.schedule": PythonObject(growing), "optimizer.warmup": Duration(0)}
    length = {"steps": Duration(settings.updates + MOST_SKIPPED), "training.steps_per_call": 1}
    return with_settings(config, growth | length)


def _trained(settings: RateSearch, run: Run) -> tuple[list[Point], int, str]:
    """Trains from fresh or pretrained parameters until `settings.updates` updates were applied.

    It ends earlier at a loss that is not finite, when the smoothed loss explodes (`Watch`), or after `MOST_SKIPPED`
    skipped steps in a row. A skipped step does not count, and its rate is tried again.

    Returns:
      Rate and loss of each applied update, the number of skipped steps, and the reason why the search ended.
    """
    state = run.packing.pack(fresh_state(run, pretrained_arrays(run.task, run.config.model)[0]))
    watch, points, skipped, in_a_row = Watch(settings.stop_above), [], 0, 0
    feed = run.feed.calls(0, itertools.repeat(1))
    while len(points) < settings.updates:
        chunk = []
        for fed in itertools.islice(feed, min(CHUNK, settings.updates - len(points))):
            state, metrics = run.train_call(state, fed, 1)
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


def plot_rates(
    points: Sequence[tuple[float, float]],
    smoothed: Sequence[float],
    suggestion: float | None,
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Draws the loss of each update and the smoothed loss over the learning rate, and writes the image to `path`.

    If the loss explodes at the highest rates, the panel is cut above the earlier losses, and a note says so.

    Args:
      points: `(rate, loss)` of each update, at least one.
      smoothed: the smoothed loss of each update.
      suggestion: the suggested rate, which gets a mark; None: no mark.
      path: the image file; its suffix selects the format.
      title: the title above the panel.

    Raises:
      OSError: the file cannot be written; the message names the file.
    """
    low, high = min(smoothed), max(smoothed[: int(np.argmin(smoothed)) + 1])
    top = high + 0.5 * (high - low)
    cut = high > low and max(smoothed) > top  # the end, where the loss explodes
    figure = new_figure(8, 4, title, "The loss leaves the panel where it explodes." if cut else "")
    panel = figure.subplots()
    dress(panel)
    rates, losses = np.transpose(points)
    panel.plot(rates, losses, color=GREY, linewidth=0.8, alpha=0.5, label="of each batch")
    panel.plot(rates, smoothed, color=BLUE, linewidth=1.8, label="smoothed")
    if suggestion is not None:
        at = float(np.interp(suggestion, rates, smoothed))
        panel.plot(suggestion, at, "o", color=VERMILION, markersize=8, label=f"suggested: {suggestion:.2g}")
    panel.set_xscale("log")
    if high > low:
        panel.set_ylim(low - 0.1 * (high - low), top)
    panel.set_xlabel("learning rate")
    panel.set_title("loss", loc="left", fontsize=11)
    legend_above(panel)
    save_figure(figure, path)


def _text(settings: RateSearch, suggestion: Suggestion, points: Sequence[Point], ended: str, folder: object) -> str:
    last = f"; {ended} at {points[-1].rate:.2g}" if points else f"; {ended}"
    if suggestion.rate is None:
        advice = "no suggestion: check the data, or try another range of rates"
        return f"{suggestion.reason}{last}\n{advice}\nsee {folder}"
    lines = [f"{suggestion.reason}{last}"]
    if suggestion.rate <= 1.01 * settings.lowest:
        lines.append(f"this is the lowest rate that was tried: a lower --lowest than {settings.lowest:g} may be better")
    if suggestion.lowest >= 0.99 * settings.highest:
        lines.append(f"the loss still falls at the highest rate: try a higher --highest than {settings.highest:g}")
    return "\n".join([*lines, f"suggested: --optimizer.learning_rate {suggestion.rate:.2g}", f"see {folder}"])
