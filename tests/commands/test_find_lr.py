"""The search for a learning rate on a real model."""

import json
import shlex

import pytest

from mpjax.commands import find_rate, plot_rates
from mpjax.config import Config, RateSearch, load_settings
from mpjax.errors import UsageError


FLAGS = "--model.name mlp --model.width 32 --model.depth 1 --data.name digits --optimizer.name adamw --highest 1"


def search(flags, folder):
    return find_rate(
        *load_settings((RateSearch, Config), [*shlex.split(f"{FLAGS} {flags}"), "--output_dir", str(folder)], prog="x")
    )


def test_each_update_has_its_rate_and_the_files_say_what_was_found(tmp_path, capsys):
    found = search("--precision.policy float32 --updates 60 --report.plot_format png svg", tmp_path / "a")
    rates = [rate for rate, _ in found["points"]]
    assert rates[:2] == pytest.approx([1e-6, 1e-6 * 1e6 ** (1 / 59)], rel=1e-5)
    assert 0.01 < found["suggestion"] < 0.1
    assert f"suggested: --optimizer.learning_rate {found['suggestion']:.2g}\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "find_lr.json").read_text()) == found
    assert (tmp_path / "a" / "find_lr.png").read_bytes().startswith(b"\x89PNG")
    assert "<!-- mlp on digits, float32 -->" in (tmp_path / "a" / "find_lr.svg").read_text()
    with pytest.raises(UsageError, match="exists and holds no run to resume: write another --output_dir"):
        search("", tmp_path / "a")


@pytest.mark.slow
def test_a_skipped_step_is_no_point_and_its_rate_comes_again(tmp_path):
    too_high = "--precision.policy mixed_float16 --precision.initial_scale 1073741824 --precision.max_scale 1073741824"
    found = search(f"{too_high} --updates 20 --highest 1e-3", tmp_path / "a")
    assert found["skipped"] > 3
    assert [rate for rate, _ in found["points"]] == pytest.approx(
        [1e-6 * 1000 ** (i / 19) for i in range(20)], rel=1e-5
    )


@pytest.mark.slow
def test_without_a_fall_there_is_no_suggestion(tmp_path, capsys):
    found = search("--updates 20 --highest 1e-5 --report.no_plot --training.accumulate auto", tmp_path / "a")
    assert found["suggestion"] is None
    printed = capsys.readouterr().out
    assert "no suggestion: check the data, or try another range of rates" in printed
    assert "--training.accumulate 1 was found" in printed
    assert not (tmp_path / "a" / "find_lr.png").exists()


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
