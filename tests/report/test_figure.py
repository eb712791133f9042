"""What all plots share."""

import os
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from mpjax.config import Report
from mpjax.report import dress, image_files, new_figure, save_figure, step_panels


def test_a_file_without_an_ending_is_png_and_none_is_left_half_written(tmp_path):
    figure = new_figure(2, 1, "a title")
    save_figure(figure, tmp_path / "plot")
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="Format 'nope' is not supported"):
        save_figure(figure, tmp_path / "plot.nope")
    assert [file.name for file in tmp_path.iterdir()] == ["plot"]


def test_texts_of_a_figure_hold_no_control_characters(tmp_path):
    """matplotlib warns of them, and an svg with them is no XML."""
    figure = new_figure(2, 2, "a\x1b[2J", note="b\x1b")
    (panel,) = step_panels(figure, [1.0])
    panel.set_title("c\x1b")
    panel.plot([0, 1], [0, 1], label="d\x1b")
    figure.legend()
    save_figure(figure, tmp_path / "a.svg")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert b"a\\x1b[2J" in (tmp_path / "a.svg").read_bytes()


def test_panels_over_steps_share_integer_ticks_and_a_panel_over_rates_need_not():
    upper, lower = step_panels(new_figure(4, 4), [2.0, 1.0])
    of_rates = new_figure(4, 4).subplots()
    dress(of_rates)
    for panel in (upper, of_rates):
        panel.plot([0, 1], [0, 1])
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "step (attempted)")
    assert all(tick == np.round(tick) for tick in lower.get_xticks())
    assert any(tick != np.round(tick) for tick in of_rates.get_xticks())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_the_same_figure_has_the_same_bytes_whenever_it_is_written(kind, tmp_path):
    program = (
        "from mpjax.report.figure import new_figure, save_figure; figure = new_figure(2, 1, 'title', 'note'); "
        f"figure.subplots().plot([1, 2], label='a'); save_figure(figure, {str(tmp_path)!r} + '/%s.{kind}')"
    )
    for name, hashes, date in (("a", "1", "0"), ("b", "2", "999999999")):
        # The seed changes the order of sets, and the date is what matplotlib would store.
        environment = {**os.environ, "PYTHONHASHSEED": hashes, "SOURCE_DATE_EPOCH": date}
        subprocess.run([sys.executable, "-c", program % name], check=True, env=environment)
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_a_title_that_is_too_wide_gets_several_lines():
    assert new_figure(4, 2, "a title of words " * 4).get_suptitle().count("\n") == 1
    assert new_figure(8, 2, "resnet18 on digits, mixed_float16").get_suptitle() == "resnet18 on digits, mixed_float16"


def test_a_plot_has_a_file_of_each_format_and_none_without_plots():
    stem = pathlib.Path("runs/v1.5/curves")
    files = image_files(stem, Report(plot_format=("pdf", "svg")))
    assert files == [pathlib.Path("runs/v1.5/curves.pdf"), pathlib.Path("runs/v1.5/curves.svg")]
    assert image_files(stem, Report(plot=False)) == []
