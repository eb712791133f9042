"""Runs of several seeds: each is the run of its seed, and the results have a mean and a spread."""

import json
import shlex

import pytest

from mpjax.commands.compare import compare_runs
from mpjax.commands.seeds import summarised, train
from mpjax.commands.train import run
from mpjax.config import load_config
from mpjax.config.comparison import Comparison
from mpjax.errors import Diverged, UsageError
from mpjax.loop.stored import read_checkpoint


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 8 --steps 6
--loop.log_every 3 --loop.eval_every 3 --report.no_tensorboard --report.no_plot --precision.policy float32
""")


def config_of(folder, *flags):
    return load_config([*SMALL, "--output_dir", str(folder), *flags])


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    return folder, train(config_of(folder, "--seeds", "3", "5"))


def test_each_run_is_that_of_its_seed(swept, tmp_path):
    folder, _ = swept
    run(config_of(tmp_path / "alone", "--seed", "5"))
    one, two = (read_checkpoint(path / "checkpoints", "6")[1] for path in (folder / "seed_5", tmp_path / "alone"))
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_the_summary_has_mean_and_spread(swept):
    folder, result = swept
    losses = [json.loads((folder / f"seed_{n}" / "summary.json").read_text())["test/loss"] for n in (3, 5)]
    assert losses[0] != losses[1]
    assert result["seeds"] == [3, 5]
    assert result["test/loss"]["mean"] == pytest.approx(sum(losses) / 2)
    assert result["test/loss"]["std"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert (result["test/loss"]["lowest"], result["test/loss"]["highest"]) == (min(losses), max(losses))
    assert json.loads((folder / "summary.json").read_text()) == result


def test_a_sweep_is_a_group_for_a_comparison(swept, tmp_path, capsys):
    folder, _ = swept
    other = tmp_path / "other"
    train(config_of(other, "--seeds", "3", "5", "--optimizer.learning_rate", "0.01"))
    runs = tuple(str(path / f"seed_{seed}") for path in (folder, other) for seed in (3, 5))
    found = compare_runs(Comparison(runs=runs, json=True))
    assert [sorted(group["seeds"]) for group in found["groups"]] == [[3, 5], [3, 5]]


def test_a_sweep_resumes_what_has_begun_and_begins_the_rest(tmp_path):
    folder = tmp_path / "sweep"
    train(config_of(folder, "--seeds", "3"))
    again = load_config(["--resume", "--output_dir", str(folder), "--seeds", "3", "5", "--steps", "8"])
    assert train(again)["seeds"] == [3, 5]
    assert [read_checkpoint(folder / f"seed_{n}" / "checkpoints", "latest")[0] for n in (3, 5)] == [8, 8]


def test_a_seed_that_diverges_is_named_and_stops_no_other(tmp_path, capsys):
    flags = "--optimizer.learning_rate 1e30 --optimizer.warmup 0 --diagnosis.no_search"
    with pytest.raises(Diverged, match="2 of 2 runs diverged: seed 3: training diverged .*; seed 5: training diverged"):
        train(config_of(tmp_path / "sweep", "--seeds", "3", "5", *shlex.split(flags)))
    assert json.loads((tmp_path / "sweep" / "summary.json").read_text()) == {"seeds": []}
    assert "seeds   none" in capsys.readouterr().out


def test_one_seed_has_no_spread():
    assert summarised({7: {"test/loss": 2.0, "policy": "x"}}) == {
        "seeds": [7],
        "test/loss": {"mean": 2.0, "std": 0.0, "lowest": 2.0, "highest": 2.0},
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seeds 3 3", "--seeds has 3 twice"),
        (
            "--seeds 3 5 --distributed.coordinator 127.0.0.1:1 --distributed.processes 2 --distributed.process 0",
            "--seeds trains in one process",
        ),
    ],
)
def test_what_cannot_be_is_an_error(tmp_path, flags, said):
    with pytest.raises(UsageError, match=said):
        train(config_of(tmp_path / "sweep", *shlex.split(flags)))
