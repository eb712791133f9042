"""The comparison of two groups of runs as a table, a plot and sentences."""

import io
import math
import re

import pytest
from rich.console import Console

from mpjax.report.comparison import Group, compare_groups
from mpjax.report.comparison_view import comparison_table, evidence, letter, plot_comparison


def group(*curves, metric="test/accuracy", name="g", every=10):
    records = [[{"step": every * i, metric: v} for i, v in enumerate(curve, start=1)] for curve in curves]
    return Group(name, {f"{name}{i}": run for i, run in enumerate(records)})


def compare(a, b, metric="test/accuracy", **settings):
    return compare_groups(metric, group(*a, metric=metric), group(*b, metric=metric, name="h"), **settings)


def scales(values):
    return [{"step": step, "train/loss_scale": float(value)} for step, value in enumerate(values, start=1)]


def test_the_table_fits_80_columns():
    found = [
        compare([[2.25], [2.5]], [[1.0], [1.5]], "train/loss"),
        compare([[1.0], [1.0]], [[32768.0], [32768.0]], "train/loss_scale"),
    ]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(comparison_table(("A", "B"), found))
    assert [line.split() for line in console.file.getvalue().splitlines()] == [
        ["metric", "A", "B", "B", "-", "A", "bands", "parts", "at"],
        ["train/loss", "2.3750±0.1768", "1.2500±0.3536", "-1.12", "3.00", "step", "10"],
        ["best", "2.3750±0.1768", "1.2500±0.3536", "-1.12", "3.00"],
        ["train/loss_scale", "1", "32768", "+3.28e+04", "inf", "by", "design"],
    ]


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_a_plot_is_drawn_for_any_number_of_groups_and_values(value, tmp_path):
    found = [
        [compare([[1.0, 2.0]], [[1.0, value]], metric) for metric in ("train/loss", "train/loss_scale")]
        for _ in range(3)
    ]
    plot_comparison(["A", "B", "C", "D"], found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_equal_curves_all_show_and_what_is_by_design_is_no_equality(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("mpjax.report.comparison_view.save_figure", lambda figure, path: figures.append(figure))
    metrics = [
        compare([[1.0, 2.0]], [[1.0, 2.0]], "train/loss"),
        compare([[1.0, 1.0]], [[8.0, 8.0]], "train/loss_scale"),
    ]
    plot_comparison(["A (1 run)", "B (1 run)"], [metrics], tmp_path / "a.png", "mlp on digits", band="std")
    (figure,) = figures
    loss, scale = figure.axes
    assert [line.get_linewidth() for line in loss.get_lines()] == [3.0, 1.5]
    assert [panel.get_title(loc="right") for panel in (loss, scale)] == ["no parting", "differs by design"]
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "mlp on digits"
    assert [text.get_text() for text in legend.get_texts()] == ["A (1 run)", "B (1 run)"]
    assert figure.get_supxlabel() == "Band: two standard deviations over the seeds, to each side. Line: their mean."


def test_groups_have_short_names():
    assert [letter(0), letter(1), letter(25), letter(26)] == ["A", "B", "Z", "27"]


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [
        (
            1,
            1,
            "one run each: how far seeds alone take such curves apart is not known, and a difference counts from 0.05",
        ),
        (2, 1, "2 and 1 runs: .*; of a single run the band is a line"),
        (2, 3, "2 and 3 runs: a difference counts where the bands from the lowest to the highest seed do not touch"),
    ],
)
def test_what_the_evidence_is_is_said_in_words(ours, theirs, first):
    groups = [Group("", {str(i): scales([8, 8, 8]) for i in range(count)}) for count in (ours, theirs)]
    found = compare_groups("train/loss_scale", *groups)
    said = evidence(*groups, [found], band="range", tolerance=0.05)
    assert re.match(first, said[0])
    assert said[1:] == ["train/loss_scale: together at the last of 3 points, step 3"]
