"""Runs of several seeds: each is the run of its seed, and the results have a mean and a spread."""

import dataclasses
import json
import shlex

import pytest

from mpjax.commands import (
    compare_runs,
    diagnose_run,
    evaluate_run,
    export_run,
    predict_run,
    run,
    summarised,
    sweep,
    table,
    train_all,
)
from mpjax.config import Compare, Diagnose, Evaluation, Export, Prediction, from_toml, load_config, save_config
from mpjax.errors import Diverged, Interrupted, UsageError
from mpjax.loop import read_checkpoint


pytestmark = pytest.mark.slow  # each runs whole commands; what they are made of has tests of its own


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 8 --steps 6
--loop.log_every 3 --loop.eval_every 3 --report.no_tensorboard --report.plot_format svg --precision.policy float32
""")


def config_of(folder, *flags):
    return load_config([*SMALL, "--output_dir", str(folder), *flags])


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    return folder, train_all(config_of(folder, "--seeds", "3", "5"))


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


def test_all_seeds_are_in_one_plot(swept):
    folder, _ = swept
    text = (folder / "seeds.svg").read_text()
    assert "<!-- mlp on synthetic:8x8x1:10, float32 -->" in text
    assert "<!-- Thick: mean of 2 seeds." in text


@pytest.mark.slow
def test_a_sweep_is_a_group_for_a_comparison(swept, tmp_path, capsys):
    folder, _ = swept
    other = tmp_path / "other"
    train_all(config_of(other, "--seeds", "3", "5", "--optimizer.learning_rate", "0.01"))
    found = compare_runs(Compare(runs=(str(folder), str(other)), plot="", json=True))
    assert [group["seeds"] for group in found["groups"]] == [[3, 5], [3, 5]]
    assert found["groups"][0]["runs"] == [str(folder / "seed_3"), str(folder / "seed_5")]


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (evaluate_run, Evaluation(run="")),
        (predict_run, Prediction(run="", split="test")),
        (export_run, Export(run="", output="a.safetensors")),
        (diagnose_run, Diagnose(run="")),
    ],
)
def test_a_command_on_one_run_names_the_folders_of_the_seeds(swept, command, settings):
    folder, _ = swept
    said = f"{folder} holds runs of several seeds: write --run {folder}/seed_3 or --run {folder}/seed_5"
    with pytest.raises(UsageError, match=f"^{said}$"):
        command(dataclasses.replace(settings, run=str(folder)))


@pytest.mark.slow
def test_a_sweep_resumes_what_has_begun_and_begins_the_rest(tmp_path):
    folder = tmp_path / "sweep"
    train_all(config_of(folder, "--seeds", "3"))
    again = load_config(["--resume", "--output_dir", str(folder), "--seeds", "3", "5", "--steps", "8"])
    assert train_all(again)["seeds"] == [3, 5]
    assert [read_checkpoint(folder / f"seed_{n}" / "checkpoints", "latest")[0] for n in (3, 5)] == [8, 8]


@pytest.mark.slow
def test_a_resumed_sweep_remembers_what_it_was_resumed_with(tmp_path):
    folder = tmp_path / "sweep"
    train_all(config_of(folder, "--seeds", "3"))
    plain = ["--resume", "--output_dir", str(folder)]
    assert train_all(load_config([*plain, "--steps", "8", "--seeds", "5"]))["seeds"] == [3, 5]
    assert (load_config(plain).steps.amount, load_config(plain).seeds) == (8, (3, 5))
    before = (folder / "summary.json").read_bytes()
    assert train_all(load_config(plain))["seeds"] == [3, 5]
    assert (folder / "summary.json").read_bytes() == before
    assert from_toml(folder / "seed_3" / "config.toml").steps.amount == 8


@pytest.mark.slow
def test_seeds_that_have_begun_are_kept_though_the_config_lacks_them(tmp_path):
    folder = tmp_path / "sweep"
    train_all(config_of(folder, "--seeds", "3", "5"))
    save_config(config_of(folder, "--seeds", "3"), folder / "config.toml")
    assert train_all(load_config(["--resume", "--output_dir", str(folder)]))["seeds"] == [3, 5]


@pytest.mark.slow
def test_a_mean_over_runs_of_other_lengths_says_so(tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert "warning" not in train_all(config_of(folder, "--seeds", "3", "5"))
    run(load_config(["--resume", "--output_dir", str(folder / "seed_3"), "--steps", "8"]))
    result = train_all(load_config(["--resume", "--output_dir", str(folder)]))
    said = "the runs differ in their steps: seed 3 has 8, seed 5 has 6"
    assert result["warning"] == json.loads((folder / "summary.json").read_text())["warning"] == said
    assert f"warning             {said}" in capsys.readouterr().out


def test_a_mean_over_runs_whose_settings_changed_on_the_way_says_so():
    plain, longer = {"test/loss": 2.0}, {"test/loss": 1.0, "changed": {"20": "steps 30, before 20"}}
    other = {"test/loss": 1.0, "changed": {"20": "steps 30, before 20; seed 1, before 0"}}
    said = "the runs differ in settings that changed on the way: seed 3 from step 20 (seed 1, before 0)"
    assert summarised({3: other, 5: plain})["warning"] == said
    assert "warning" not in summarised({3: longer, 5: plain})


def test_a_run_that_has_begun_is_not_resumed_with_other_settings_for_a_mean(swept):
    folder, _ = swept
    before = (folder / "config.toml").read_bytes()
    other = ["--resume", "--output_dir", str(folder), "--seeds", "7", "--optimizer.learning_rate", "0.01"]
    said = "seed_3 has not: optimizer.learning_rate 0.01, before 0.1; .*; write another --output_dir for a new sweep"
    with pytest.raises(UsageError, match=said):
        train_all(load_config(other))
    assert (folder / "config.toml").read_bytes() == before


def test_a_sweep_and_a_run_are_not_resumed_as_each_other(swept):
    folder, _ = swept
    with pytest.raises(UsageError, match=r"holds runs of several seeds; write --seeds 3 5 .* --output_dir .*/seed_3"):
        run(dataclasses.replace(load_config(["--resume", "--output_dir", str(folder)]), seeds=()))
    with pytest.raises(UsageError, match="seed_3 holds one run; leave out --seeds"):
        train_all(load_config(["--resume", "--output_dir", str(folder / "seed_3"), "--seeds", "3", "5"]))


def test_a_sweep_whose_first_run_is_refused_leaves_no_folder_or_its_settings_of_before(swept, tmp_path):
    with pytest.raises(UsageError, match="nothing.py"):
        train_all(config_of(tmp_path / "new", "--seeds", "3", "--loop.callbacks", "nothing.py:f"))
    assert not (tmp_path / "new").exists()
    folder, _ = swept
    before = (folder / "config.toml").read_bytes()
    with pytest.raises(UsageError, match="nothing.py"):
        train_all(load_config(["--resume", "--output_dir", str(folder), "--loop.callbacks", "nothing.py:f"]))
    assert (folder / "config.toml").read_bytes() == before


@pytest.mark.slow
def test_a_seed_that_diverges_is_named_and_stops_no_other(tmp_path, capsys):
    flags = "--optimizer.learning_rate 1e30 --optimizer.warmup 0 --diagnosis.no_search"
    with pytest.raises(Diverged, match="2 of 2 runs diverged: seed 3: training diverged .*; seed 5: training diverged"):
        train_all(config_of(tmp_path / "sweep", "--seeds", "3", "5", *shlex.split(flags)))
    assert json.loads((tmp_path / "sweep" / "summary.json").read_text()) == {"seeds": []}
    assert "not finite" in (tmp_path / "sweep" / "seeds.svg").read_text()
    assert "seeds   none" in capsys.readouterr().out


def test_one_seed_has_no_spread():
    result = summarised({7: {"test/loss": 2.0, "policy": "x"}})
    assert result == {"seeds": [7], "test/loss": {"mean": 2.0, "std": None, "lowest": 2.0, "highest": 2.0}}
    assert table(result, "runs/a\x1b").splitlines()[-1] == r"folder     runs/a\x1b"
    assert table(result, "runs/a").splitlines()[1] == "test loss  2.0000  (1 seed: its spread is not known)"


@pytest.mark.slow
def test_a_comparison_shows_the_mean_and_standard_deviation_of_the_sweep(swept, tmp_path, capsys):
    folder, result = swept
    train_all(config_of(tmp_path / "other", "--seeds", "3", "5", "--optimizer.learning_rate", "0.01"))
    capsys.readouterr()
    compare_runs(Compare(runs=(str(folder), str(tmp_path / "other")), plot="", metrics=("test/loss",)))
    shown = f"{result['test/loss']['mean']:.4f}±{result['test/loss']['std']:.4f}"
    out = capsys.readouterr().out
    assert shown in out
    assert "do not touch; shown are mean ± standard deviation" in out


def test_the_runs_of_one_sweep_are_one_group(swept):
    folder, _ = swept
    with pytest.raises(UsageError, match="all runs have the same settings but for the seed: that is one group"):
        compare_runs(Compare(runs=(str(folder),), plot=""))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seeds 3 3", "--seeds has 3 twice"),
        ("--seeds 3 5 --seed 7", "--seed 7 with --seeds 3 5: each run has its own; leave out --seed"),
        (
            "--seeds 3 5 --distributed.coordinator 127.0.0.1:1 --distributed.processes 2 --distributed.process 0",
            "--seeds trains in one process",
        ),
    ],
)
def test_what_cannot_be_is_an_error(tmp_path, flags, said):
    with pytest.raises(UsageError, match=said):
        train_all(config_of(tmp_path / "sweep", *shlex.split(flags)))


def test_a_sweep_that_is_stopped_is_resumed_as_a_whole(tmp_path):
    def stopped(config):
        raise Interrupted("stopped at step 3; the checkpoint is saved; to resume:\nthe line of this seed", 15)

    with pytest.raises(Interrupted) as raised:
        sweep(load_config(["--seeds", "4", "5", "--output_dir", str(tmp_path / "all")]), stopped)
    said = "seed 4: stopped at step 3; the checkpoint is saved; to resume:"
    line = f"python scripts/train.py --resume --output_dir {tmp_path}/all --seeds 4 5"
    assert (str(raised.value), raised.value.signal_number) == (f"{said}\n{line}", 15)
