"""Runs with --precision.tune: rules found, kept in the settings, and found again."""

import shlex
import tomllib

import pytest

import mpjax.commands.tune
from mpjax.commands.train import run
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.training.tuning.timing import Timed, Timing
from mpjax.training.tuning.tune_products import Tuning


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 4 --loop.log_every 2 --loop.eval_every 4 --loop.save_every 2 --report.no_tensorboard --report.no_plot
""")
HALF = Timing((2.0,) * 4, (1.0,) * 4)


def settings(folder, *flags):
    return load_config(
        [*SMALL, "--precision.tune", "--output_dir", str(folder), "--cache_dir", str(folder) + "_cache", *flags]
    )


@pytest.fixture
def found(monkeypatch):
    """Tuning that finds the head slower in half precision; counts how often it is asked."""
    asked = []

    def tune(task, products, time_step):
        asked.append([product.path for product in products])
        return Tuning((Timed("Linear", ("head",), HALF),), {"head": "float32"}, HALF)

    monkeypatch.setattr(mpjax.commands.tune, "tune", tune)
    return asked


def saved(folder):
    return tomllib.loads((folder / "config.toml").read_text())["precision"]


@pytest.mark.slow
def test_rules_that_are_found_are_in_the_settings_of_the_run_which_repeat_it_without_tuning(found, tmp_path, capsys):
    run(settings(tmp_path / "run", "--precision.rules", "layers/0", "float32"))
    assert found == [["layers/1", "head"]]
    precision = saved(tmp_path / "run")
    assert precision["rules"] == {"layers/0": "float32", "head": "float32"}
    assert precision["tune"] is False
    said = capsys.readouterr().out
    assert "tuned on cpu: 1 of 1 kinds of products are slower in half precision; rules keep 'head' in float32" in said
    assert "2.00 times as fast (2000 ms to 1000 ms); kept in " in said


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_rules_and_times_nothing(found, tmp_path, capsys):
    run(settings(tmp_path / "run"))
    run(load_config(["--resume", "--precision.tune", "--output_dir", str(tmp_path / "run"), "--steps", "6"]))
    assert len(found) == 1
    assert saved(tmp_path / "run")["rules"] == {"head": "float32"}
    assert "--precision.tune does nothing: a resumed run keeps its rules" in capsys.readouterr().out


def test_a_folder_that_is_taken_is_refused_before_anything_is_timed(found, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(UsageError, match="holds no run to resume: write another --output_dir"):
        run(settings(tmp_path / "run"))
    assert found == []


def test_what_was_found_is_found_again_for_the_same_batches_only(found, tmp_path):
    _, first = mpjax.commands.tune.tuned(settings(tmp_path / "a"))
    config, again = mpjax.commands.tune.tuned(settings(tmp_path / "a"))
    assert len(found) == 1
    assert config.precision.rules == {"head": "float32"}
    assert again == f"{first.partition('; kept in ')[0]}; found earlier"
    mpjax.commands.tune.tuned(settings(tmp_path / "a", "--data.batch_size", "16"))
    assert len(found) == 2


@pytest.mark.parametrize("damage", ["", '{"key": {}}'])
def test_a_damaged_cache_is_measured_again(found, tmp_path, damage):
    mpjax.commands.tune.tuned(settings(tmp_path / "a"))
    (file,) = (tmp_path / "a_cache" / "tuning").iterdir()
    file.write_text(damage)
    mpjax.commands.tune.tuned(settings(tmp_path / "a"))
    assert len(found) == 2


def test_float32_has_nothing_to_tune(found, tmp_path):
    config, said = mpjax.commands.tune.tuned(settings(tmp_path / "a", "--precision.policy", "float32"))
    assert said == "nothing to tune: float32 computes in float32"
    assert (found, config.precision.rules, config.precision.tune) == ([], {}, False)


def test_without_tune_nothing_happens(found, tmp_path):
    config = load_config([*SMALL, "--output_dir", str(tmp_path / "a")])
    assert mpjax.commands.tune.tuned(config) == (config, "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["module", "autocast"])
def test_a_run_is_tuned_by_the_clock(tmp_path, capsys, mode):
    summary = run(settings(tmp_path / "run", "--precision.mode", mode))
    said = capsys.readouterr().out
    assert "tuning: 3 kinds of products in both dtypes, then the step" in said
    assert "tuned on cpu: " in said
    assert " of 3 kinds of products are slower in half precision" in said
    assert summary["steps"] + summary["skipped"] == 4
