"""The plot of a range test."""

import pytest

from mpjax.report import plot_rates


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "first"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_selects_the_format(tmp_path, ending, first):
    path = tmp_path / f"rates.{ending}"
    plot_rates([(1e-3, 2.0), (1e-2, 1.0), (0.1, float("1e9"))], [2.0, 1.5, 1e8], 1e-2, path)
    assert path.read_bytes().startswith(first)


def test_a_loss_that_leaves_the_panel_is_told(tmp_path):
    for last, cut in ((1e8, True), (1.6, False)):
        plot_rates([(1e-3, 2.0), (1e-2, 1.0), (0.1, last)], [2.0, 1.5, last], 1e-2, tmp_path / "rates.svg")
        assert ("The loss leaves the panel" in (tmp_path / "rates.svg").read_text()) is cut


def test_a_test_without_a_suggestion_is_drawn_too(tmp_path):
    plot_rates([(1e-3, 2.0)], [2.0], None, tmp_path / "rates.svg")
    assert "suggested" not in (tmp_path / "rates.svg").read_text()
