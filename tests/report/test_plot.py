"""curves.png: which panels, which marks, and no crash on odd runs."""

import math
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from mpjax.report import plot
from mpjax.report.plot import plot_curves


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

    return draw


def curves(panel):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.get_lines()}


def test_a_float16_run_has_three_panels_on_one_axis(drawn):
    loss, accuracy, scale = drawn(FLOAT16).axes
    assert [panel.get_title(loc="left") for panel in (loss, accuracy, scale)] == ["Loss", "Accuracy", "Loss scale"]
    assert loss.get_shared_x_axes().joined(loss, scale)
    assert curves(loss) == {
        "train": ([20, 40, 60], [2.0, 1.5, 1.0]),
        "test": ([40], [1.75]),
        "test, averaged": ([40], [1.5]),
    }
    assert (loss.get_yscale(), scale.get_yscale()) == ("linear", "log")
    assert accuracy.yaxis.get_major_formatter()(0.9, 0).endswith("%")


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
    marks = curves(drawn(FLOAT16).axes[2])["skipped (3)"]
    assert marks[0] == [20, 60]


def test_a_run_without_scaling_has_no_such_panel(drawn):
    records = [train(20, scale=1.0), train(40, scale=1.0)]
    assert [panel.get_title(loc="left") for panel in drawn(records).axes] == ["Loss", "Accuracy"]


def test_values_that_are_not_finite_leave_a_gap_and_a_mark(drawn):
    records = [train(20, 2.0), train(40, math.nan), train(60, math.inf), train(80, 1.0)]
    lines = curves(drawn(records).axes[0])
    assert [math.isnan(value) for value in lines["train"][1]] == [False, True, True, False]
    assert lines["not finite"][0] == [40, 60]


def test_a_single_point_shows(drawn):
    line = drawn([train(20)]).axes[0].get_lines()[0]
    assert line.get_marker() == "o"


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


def test_legends_stand_outside_the_data(drawn):
    figure = drawn(FLOAT16)
    for panel in figure.axes:
        assert panel.get_legend().get_window_extent().y0 >= panel.get_window_extent().y1


@pytest.mark.parametrize(
    "records",
    [[], [{"step": 1}], [train(1, math.nan, math.nan)], [train(1, scale=0.5), train(2, scale=2.0**24)], FLOAT16],
    ids=["none", "no numbers", "only NaN", "wide scale", "all"],
)
def test_an_image_is_written_whatever_the_run(records, tmp_path):
    path = tmp_path / "curves.png"
    plot_curves(records, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000


def test_pyplot_is_left_alone(tmp_path):
    program = (
        "import sys; from mpjax.report.plot import plot_curves; "
        f"plot_curves([], {str(tmp_path / 'curves.png')!r}); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert "matplotlib" not in vars(plot)


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
        "The metrics of steps 21 to 30 are lost.",
    ]
