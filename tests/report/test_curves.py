"""curves.png and seeds.png: which panels, which marks, and no crash on odd runs."""

import math
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from mpjax.report import curves, plot_curves, plot_seeds


def train(step, loss=1.0, scale=32768.0, skipped=0):
    return {
        "step": step,
        "train/loss": loss,
        "train/loss_scale": scale,
        "train/skipped": skipped,
        "train/accuracy": 0.5,
    }


FLOAT16 = [
    train(20, 2.0, 16384.0, skipped=1),
    train(40, 1.5, 16384.0, skipped=1),
    {"step": 40, "test/loss": 1.75, "test/accuracy": 0.875, "ema/loss": 1.5, "ema/accuracy": 0.9},
    train(60, 1.0, 4096.0, skipped=3),
]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws and gives the figure."""
    figures = []
    save = Figure.savefig

    def keep(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(records, history=()):
        plot_curves(records, tmp_path / "curves.png", "title", history)
        return figures[-1]

    draw.figures = figures
    return draw


def lines_in(panel):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.get_lines()}


def test_a_float16_run_has_three_panels_on_one_axis(drawn):
    loss, accuracy, scale = drawn(FLOAT16).axes
    assert [panel.get_title(loc="left") for panel in (loss, accuracy, scale)] == ["Loss", "Accuracy", "Loss scale"]
    assert loss.get_shared_x_axes().joined(loss, scale)
    assert lines_in(loss) == {
        "train": ([20, 40, 60], [2.0, 1.5, 1.0]),
        "test": ([40], [1.75]),
        "test, averaged": ([40], [1.5]),
    }
    assert (loss.get_yscale(), scale.get_yscale()) == ("linear", "log")
    assert accuracy.yaxis.get_major_formatter()(0.9, 0).endswith("%")


@pytest.mark.slow
def test_the_last_value_of_an_evaluation_stands_beside_its_point(drawn):
    loss, accuracy, _ = drawn(FLOAT16).axes
    assert [(text.get_text(), text.xy) for text in loss.texts] == [("1.5", (40, 1.5)), ("1.75", (40, 1.75))]
    assert [text.get_text() for text in accuracy.texts] == ["87.5%", "90.0%"]
    accuracy.figure.canvas.draw()
    lower, higher = (text.get_window_extent() for text in accuracy.texts)
    assert lower.y1 <= higher.y0


def test_evaluations_are_joined_also_where_one_was_skipped(drawn):
    records = [{"step": step, "test/loss": 1.0, **({"train/loss": 1.0} if step > 10 else {})} for step in (10, 20, 40)]
    line = drawn(records).axes[0].get_lines()[-1]
    assert (list(line.get_xdata()), line.get_marker(), line.get_linestyle()) == ([10, 20, 40], "o", "-")


def test_skipped_steps_are_marked_where_the_count_rises(drawn):
    marks = lines_in(drawn(FLOAT16).axes[2])["skipped (3)"]
    assert marks[0] == [20, 60]


def test_a_run_without_scaling_has_no_such_panel(drawn):
    records = [train(20, scale=1.0), train(40, scale=1.0)]
    assert [panel.get_title(loc="left") for panel in drawn(records).axes] == ["Loss", "Accuracy"]


def test_values_that_are_not_finite_leave_a_gap_and_a_mark(drawn):
    records = [train(20, 2.0), train(40, math.nan), train(60, math.inf), train(80, 1.0)]
    lines = lines_in(drawn(records).axes[0])
    assert [math.isnan(value) for value in lines["train"][1]] == [False, True, True, False]
    assert lines["not finite"][0] == [40, 60]


@pytest.mark.slow
def test_a_single_point_shows(drawn):
    line = drawn([train(20)]).axes[0].get_lines()[0]
    assert line.get_marker() == "o"


@pytest.mark.slow
def test_marks_of_skipped_steps_stand_below_the_scale(drawn):
    panel = drawn([train(20, scale=2.0**24), train(40, scale=1.0, skipped=1)]).axes[2]
    panel.figure.canvas.draw()
    lowest = panel.transAxes.inverted().transform(panel.transData.transform((40, 1.0)))[1]
    assert lowest > 0.1


def test_a_long_run_is_drawn_thin_and_without_dots(drawn):
    records = [{"step": step, "train/loss": 1.0, "test/loss": 1.0} for step in range(500)]
    for line in drawn(records).axes[0].get_lines():
        assert (line.get_marker(), line.get_linewidth()) == ("", 0.7)


def test_accuracy_is_not_drawn_beyond_100_percent(drawn):
    records = [{"step": step, "train/accuracy": 1.0} for step in (1, 2)]
    (panel,) = drawn(records).axes
    assert 1.0 < panel.get_ylim()[1] < 1.01


@pytest.mark.slow
def test_legends_stand_outside_the_data(drawn):
    figure = drawn(FLOAT16)
    for panel in figure.axes:
        assert panel.get_legend().get_window_extent().y0 >= panel.get_window_extent().y1


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1}],
        [train(1, math.nan, math.nan)],
        pytest.param([train(1, scale=0.5), train(2, scale=2.0**24)], marks=pytest.mark.slow),
        pytest.param(FLOAT16, marks=pytest.mark.slow),
    ],
    ids=["none", "no numbers", "only NaN", "wide scale", "all"],
)
def test_an_image_is_written_whatever_the_run(records, tmp_path):
    path = tmp_path / "curves.png"
    plot_curves(records, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000


@pytest.mark.slow
def test_pyplot_is_left_alone(tmp_path):
    program = (
        "import sys; from mpjax.report import plot_curves; "
        f"plot_curves([], {str(tmp_path / 'curves.png')!r}); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert "matplotlib" not in vars(curves)


@pytest.mark.slow
def test_the_steps_from_which_settings_changed_and_lost_metrics_are_marked(drawn):
    history = [
        {"step": 0, "policy": "a", "changed": {}},
        {"step": 20, "policy": "b", "changed": {"seed": ["0", "1"]}},
        {"step": 30, "policy": "b", "changed": {"loop.keep": ["1", "2"]}, "metrics_missing": [21, 30]},
    ]
    records = [{"step": step, "train/loss": 1.0, "train/loss_scale": 2.0} for step in (10, 20, 40)]
    figure = drawn(records, history)
    for panel in figure.axes:
        assert [line.get_xdata()[0] for line in panel.get_lines() if line.get_linestyle() == "--"] == [20]
    assert figure.get_supxlabel().splitlines() == [
        "A value of training is the mean of the steps since the value before.",
        "Dashed, from step 20: seed 1, before 0.",
        "Metrics of steps 21 to 30 are lost.",
    ]


def run(*losses, skipped=0, scale=1.0):
    return [
        {"step": 10 * i, "train/loss": loss, "test/loss": loss / 2, "train/loss_scale": scale, "train/skipped": skipped}
        for i, loss in enumerate(losses, start=1)
    ]


@pytest.fixture
def seeds(drawn, tmp_path):
    """Draws seeds.png and gives the figure."""

    def draw(runs):
        plot_seeds(runs, tmp_path / "seeds.png", "title")
        return drawn.figures[-1]

    return draw


def labelled(panel):
    return {line.get_label(): line for line in panel.get_lines() if not line.get_label().startswith("_")}


def test_the_mean_of_the_seeds_is_thick_in_a_band_of_one_standard_deviation(seeds):
    figure = seeds({3: run(4.0, 2.0), 5: run(6.0, 2.0)})
    (panel,) = figure.axes
    lines = labelled(panel)
    assert list(lines) == ["train", "test"]
    assert list(lines["train"].get_ydata()) == [5.0, 2.0]
    assert list(lines["test"].get_ydata()) == [2.5, 1.0]
    low, high = panel.collections[0].get_datalim(panel.transData).intervaly
    assert (low, high) == pytest.approx((2.0, 5.0 + math.sqrt(2)))
    assert figure.get_supxlabel() == (
        "Thick: mean of 2 seeds. Band: one standard deviation. Thin: each seed. "
        "A value of training is the mean of the steps since the value before."
    )
    thin = [list(line.get_ydata()) for line in panel.get_lines() if line.get_linewidth() == 0.7]
    assert thin == [[4.0, 2.0], [6.0, 2.0], [2.0, 1.0], [3.0, 1.0]]
    assert [text.get_text() for text in panel.texts] == ["1"]


def test_a_seed_that_diverged_ends_the_mean_and_is_marked(seeds):
    (panel,) = seeds({0: run(4.0, math.nan), 1: run(6.0, 2.0, 1.0)}).axes
    lines = labelled(panel)
    assert (list(lines["train"].get_xdata()), lines["train"].get_ydata()[0]) == ([10, 20], 5.0)
    assert math.isnan(lines["train"].get_ydata()[1])
    assert set(lines["not finite"].get_xdata()) == {20}


def test_one_evaluation_has_a_point_and_a_bar_for_its_spread(seeds):
    (panel,) = seeds({0: run(4.0), 1: run(6.0)}).axes
    lines = labelled(panel)
    assert [line.get_marker() for line in lines.values()] == ["o", "o"]
    bars = [collection.get_segments()[0] for collection in panel.collections if hasattr(collection, "get_segments")]
    assert [[float(y) for _, y in bar] for bar in bars] == [
        pytest.approx([5 - 2**0.5, 5 + 2**0.5]),
        pytest.approx([2.5 - 0.5**0.5, 2.5 + 0.5**0.5]),
    ]


def test_one_seed_has_no_band_and_the_figure_says_why(seeds):
    note = seeds({0: run(4.0, 3.0)}).get_supxlabel()
    assert note.startswith("One seed: its spread is not known, so there is no band.")


def test_each_seed_has_its_loss_scale_and_skips_are_added_up(seeds):
    _, panel = seeds({0: run(4.0, 3.0, skipped=1, scale=8.0), 1: run(4.0, 3.0, skipped=2, scale=2.0)}).axes
    assert [list(line.get_ydata()) for line in panel.get_lines()[:2]] == [[8.0, 8.0], [2.0, 2.0]]
    assert list(labelled(panel)) == ["skipped (3 in all)"]


@pytest.mark.parametrize("runs", [{}, {0: []}, {0: run(1.0)}, {0: [], 1: run(1.0)}], ids=["0", "none", "one", "late"])
def test_an_image_is_written_whatever_the_runs(runs, tmp_path):
    plot_seeds(runs, tmp_path / "seeds.png")
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
