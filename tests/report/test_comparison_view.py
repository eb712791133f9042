"""The comparison of two groups of runs as a table, a plot and sentences."""

import io
import math
import re

import pytest
from rich.console import Console

from mpjax.report import Group, compare_groups, comparison_table, evidence, letter, plot_comparison


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


def test_two_losses_that_are_not_finite_are_not_called_together(panel_of):
    found = compare([[1.0, math.nan]], [[1.0, math.inf]], "train/loss")
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(comparison_table(("A", "B"), [found]))
    assert console.file.getvalue().splitlines()[1].split() == ["train/loss", "nan", "inf", "+nan", "-", "not", "finite"]
    sentences = evidence(group([1.0]), group([1.0]), [found], band="range", tolerance=0.05)
    assert (
        sentences[1] == "train/loss: not finite in some run of each group at the last of 2 points, step 20; "
        "no difference to judge"
    )
    assert panel_of(found)[0].get_title(loc="right") == "not finite"


@pytest.mark.parametrize("value", [pytest.param(0.5, marks=pytest.mark.slow), math.nan])
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
    assert figure.get_supxlabel() == (
        "One run of each: how far seeds alone take them apart is not known, so there is no band."
    )
    assert [panel.get_title(loc="left") for panel in (loss, scale)] == ["train/loss", "train/loss_scale"]


@pytest.fixture
def panel_of(monkeypatch, tmp_path):
    """Draws a comparison of one metric, and gives its panel and its figure."""
    figures = []
    monkeypatch.setattr("mpjax.report.comparison_view.save_figure", lambda figure, path: figures.append(figure))

    def draw(found, **options):
        plot_comparison(["A", "B"], [[found]], tmp_path / "a.png", **options)
        return figures[-1].axes[0], figures[-1]

    return draw


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("train/loss", ", each the mean of up to 3 values"),
        ("train/grad_norm", ", each the mean of up to 3 values"),
        ("train/loss_scale", ""),
        ("test/accuracy", ""),
    ],
)
def test_what_is_smoothed_says_so_where_it_is_drawn_and_told(panel_of, metric, said):
    found = compare([[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 4.0, 8.0]], metric, smoothing=3)
    panel, _ = panel_of(found)
    assert panel.get_title(loc="left") == metric + said
    sentences = evidence(group([1.0]), group([1.0]), [found], band="range", tolerance=0.05)
    assert ("mean of up to 3" in sentences[1]) == bool(said)
    whole = compare([[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 4.0, 8.0]], metric, smoothing=1)
    assert panel_of(whole)[0].get_title(loc="left") == metric


BAND = "Band: from the lowest to the highest seed. Line: its middle."


@pytest.mark.parametrize(
    ("ours", "theirs", "note"),
    [
        (2, 2, BAND),
        (1, 2, f"{BAND} A group of one run has no band."),
        (2, 1, f"{BAND} A group of one run has no band."),
        (1, 1, "One run of each: how far seeds alone take them apart is not known, so there is no band."),
    ],
)
def test_a_band_that_is_missing_has_its_reason(panel_of, ours, theirs, note):
    found = compare([[1.0, 2.0], [1.5, 3.0]][:ours], [[1.0, 2.0], [1.5, 4.0]][:theirs])
    assert panel_of(found)[1].get_supxlabel() == note


@pytest.mark.parametrize("band", ["range", "std"])
def test_the_band_of_a_single_evaluation_is_a_bar(panel_of, band):
    found = compare([[0.25], [0.75]], [[0.5], [1.5]], band=band)
    panel, _ = panel_of(found, band=band)
    bars = [collection for collection in panel.collections if hasattr(collection, "get_segments")]
    half = {"range": (0.25, 0.5), "std": (2 * 0.5 / 2**0.5, 2 * 1.0 / 2**0.5)}[band]
    ends = [tuple(float(y) for _, y in bar.get_segments()[0]) for bar in bars]
    assert ends == [pytest.approx((0.5 - half[0], 0.5 + half[0])), pytest.approx((1.0 - half[1], 1.0 + half[1]))]


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
