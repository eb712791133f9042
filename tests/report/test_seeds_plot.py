"""seeds.png: the curves of all seeds, their mean and their spread."""

import math

import numpy as np
import pytest

from mpjax.report.seeds_plot import plot_seeds, together


def run(*losses, skipped=0, scale=1.0):
    return [
        {"step": 10 * i, "train/loss": loss, "test/loss": loss / 2, "train/loss_scale": scale, "train/skipped": skipped}
        for i, loss in enumerate(losses, start=1)
    ]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws and gives the figure."""
    figures = []
    monkeypatch.setattr("mpjax.report.plot.save_figure", lambda figure, path: figures.append(figure))

    def draw(runs):
        plot_seeds(runs, tmp_path / "seeds.png", "title")
        return figures[-1]

    return draw


def labelled(panel):
    return {line.get_label(): line for line in panel.get_lines() if not line.get_label().startswith("_")}


def test_the_mean_of_the_seeds_is_thick_in_a_band_of_one_standard_deviation(drawn):
    figure = drawn({3: run(4.0, 2.0), 5: run(6.0, 2.0)})
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


def test_a_seed_that_diverged_ends_the_mean_and_is_marked(drawn):
    (panel,) = drawn({0: run(4.0, math.nan), 1: run(6.0, 2.0, 1.0)}).axes
    lines = labelled(panel)
    assert (list(lines["train"].get_xdata()), lines["train"].get_ydata()[0]) == ([10, 20], 5.0)
    assert math.isnan(lines["train"].get_ydata()[1])
    assert set(lines["not finite"].get_xdata()) == {20}


def test_one_evaluation_has_a_point_and_a_bar_for_its_spread(drawn):
    (panel,) = drawn({0: run(4.0), 1: run(6.0)}).axes
    lines = labelled(panel)
    assert [line.get_marker() for line in lines.values()] == ["o", "o"]
    bars = [collection.get_segments()[0] for collection in panel.collections if hasattr(collection, "get_segments")]
    assert [[float(y) for _, y in bar] for bar in bars] == [
        pytest.approx([5 - 2**0.5, 5 + 2**0.5]),
        pytest.approx([2.5 - 0.5**0.5, 2.5 + 0.5**0.5]),
    ]


def test_one_seed_has_no_band_and_the_figure_says_why(drawn):
    note = drawn({0: run(4.0, 3.0)}).get_supxlabel()
    assert note.startswith("One seed: its spread is not known, so there is no band.")


def test_values_are_those_of_steps_that_all_seeds_have():
    steps, values = together({0: run(4.0, 3.0), 1: run(6.0)}, "train/loss")
    assert steps == [10]
    np.testing.assert_array_equal(values, [[4.0], [6.0]])
    assert together({0: run(1.0)}, "test/accuracy")[0] == []
    assert together({}, "train/loss")[0] == []


def test_each_seed_has_its_loss_scale_and_skips_are_added_up(drawn):
    _, panel = drawn({0: run(4.0, 3.0, skipped=1, scale=8.0), 1: run(4.0, 3.0, skipped=2, scale=2.0)}).axes
    assert [list(line.get_ydata()) for line in panel.get_lines()[:2]] == [[8.0, 8.0], [2.0, 2.0]]
    assert list(labelled(panel)) == ["skipped (3 in all)"]


@pytest.mark.parametrize("runs", [{}, {0: []}, {0: run(1.0)}, {0: [], 1: run(1.0)}], ids=["0", "none", "one", "late"])
def test_an_image_is_written_whatever_the_runs(runs, tmp_path):
    plot_seeds(runs, tmp_path / "seeds.png")
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
