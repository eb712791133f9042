"""The comparison of run folders, handwritten and made by the trainer, and its command."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

import mpjax
from mpjax import cli
from mpjax.commands import IRRELEVANT, compare_runs
from mpjax.config import Compare, Config, load_config, save_config
from mpjax.errors import UsageError


ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def config_of(flags):
    return load_config(flags.split())


def make_run(folder, flags, losses):
    """A run's folder as the trainer leaves it: its settings, and a report of each tenth step."""
    folder.mkdir()
    save_config(dataclasses.replace(config_of(flags), output_dir=str(folder)), folder / "config.toml")
    lines = [{"step": 10 * i, "time": 1.0, "train/loss": loss} for i, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    """Two policies, two seeds; float16 rises from step 30 on."""
    full, half = "--precision.policy float32", "--precision.policy mixed_float16"
    return (
        make_run(tmp_path / "full0", f"{full} --seed 0", [3.0, 2.0, 1.0, 1.0]),
        make_run(tmp_path / "full1", f"{full} --seed 1", [3.2, 2.2, 1.2, 1.2]),
        make_run(tmp_path / "half0", f"{half} --seed 0", [3.1, 2.1, 1.5, 2.0]),
        make_run(tmp_path / "half1", f"{half} --seed 1 --report.no_plot --loop.keep 9", [3.3, 2.3, 1.7, 2.2]),
    )


def settings(*runs, **fields):
    given = {"metrics": ("train/loss",), "smoothing": 1, "plot": ""}
    return Compare(runs=runs, **{**given, **fields})


def test_runs_that_differ_in_the_seed_only_are_one_group(runs):
    result = compare_runs(settings(*runs))
    assert result["groups"] == [
        {"name": "precision.policy=float32", "seeds": [0, 1], "runs": list(runs[:2])},
        {"name": "precision.policy=mixed_float16", "seeds": [0, 1], "runs": list(runs[2:])},
    ]


def test_the_folder_of_a_run_of_several_seeds_is_all_of_them(tmp_path):
    for policy in ("float32", "bfloat16"):
        (tmp_path / policy).mkdir()
        for seed in (0, 11):
            make_run(tmp_path / policy / f"seed_{seed}", f"--precision.policy {policy} --seed {seed}", [2.0, 1.0])
    result = compare_runs(settings(str(tmp_path / "float32"), str(tmp_path / "bfloat16")))
    assert [group["seeds"] for group in result["groups"]] == [[0, 11], [0, 11]]
    assert result["groups"][0]["runs"][1] == str(tmp_path / "float32" / "seed_11")


def test_the_result_says_where_they_part_and_by_how_much(runs):
    (found,) = compare_runs(settings(*runs))["comparisons"]
    loss = found["train/loss"]
    assert (loss["parts_at"], loss["points_apart"], loss["points"], loss["last_step"]) == (30, 2, 4, 40)
    assert loss["final"]["difference"] == pytest.approx(1.0)
    assert loss["final"]["bands"] == pytest.approx(5.0)  # halves of 0.1 each
    assert loss["best"]["other"]["center"] == pytest.approx(1.6)


def test_single_runs_are_held_against_the_tolerance(runs):
    first, _, third, _ = runs
    assert compare_runs(settings(first, third))["comparisons"][0]["train/loss"]["parts_at"] == 30
    found = compare_runs(settings(first, third, tolerance=0.4))["comparisons"][0]
    assert found["train/loss"]["parts_at"] == 40


def test_seeds_choose_among_the_runs(runs):
    result = compare_runs(settings(*runs, seeds=(1,)))
    assert [group["runs"] for group in result["groups"]] == [[runs[1]], [runs[3]]]
    with pytest.raises(UsageError, match="--seeds: no run of seed 7 with precision.policy=float32: it has 0, 1"):
        compare_runs(settings(*runs, seeds=(0, 7)))


@pytest.mark.slow
def test_a_third_group_is_compared_with_the_first(runs, tmp_path):
    third = make_run(tmp_path / "lr", "--precision.policy float32 --optimizer.learning_rate 0.5", [3.1, 2.1, 1.1, 1.1])
    result = compare_runs(settings(*runs, third))
    assert result["groups"][2]["name"] == "precision.policy=float32, optimizer.learning_rate=0.5"
    assert [found["train/loss"]["parts_at"] for found in result["comparisons"]] == [30, None]


def test_the_table_says_groups_numbers_and_steps(runs, capsys, tmp_path):
    compare_runs(settings(*runs, plot=str(tmp_path / "a.png")))
    out = capsys.readouterr().out
    assert f"A: precision.policy=float32  ({runs[0]}, {runs[1]})" in out
    assert "train/loss parts at step 30 and stays apart, 2 of 4 points" in out
    assert "2 and 2 runs: a difference counts where the bands from the lowest to the highest seed do not touch" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_replaces_a_file_says_so(runs, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("mpjax.report.comparison_view.plot_comparison", lambda *args, **more: None)
    compare_runs(settings(*runs, plot=str(tmp_path / "a.png")))
    assert not capsys.readouterr().err
    (tmp_path / "a.png").write_text("mine")
    compare_runs(settings(*runs, plot=str(tmp_path / "a.png"), json=True))
    assert capsys.readouterr().err == f"note: {tmp_path}/a.png was replaced; write another --plot to keep both\n"


@pytest.mark.slow
def test_the_plot_is_titled_by_what_the_runs_have_in_common(runs, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("mpjax.report.comparison_view.plot_comparison", lambda *args, **more: seen.append((args, more)))
    other = make_run(tmp_path / "mlp", "--precision.policy float32 --model.name mlp", [3.0, 2.0, 1.0, 1.0])
    for group in (runs, (*runs, other)):
        compare_runs(settings(*group, plot=str(tmp_path / "a.pdf"), band="std"))
    (names, _, path, title), more = seen[0]
    assert names == ["A: precision.policy=float32 (2 runs)", "B: precision.policy=mixed_float16 (2 runs)"]
    assert (path, title, more) == (tmp_path / "a.pdf", "resnet18 on digits", {"band": "std"})
    assert seen[1][0][3] == "digits"


def test_json_is_the_result_and_spells_what_is_not_finite(runs, capsys, tmp_path):
    lost = make_run(tmp_path / "lost", "--precision.policy float16", [3.0, 2.0, 1.0, 1.0])
    text = pathlib.Path(lost, "metrics.jsonl").read_text()
    pathlib.Path(lost, "metrics.jsonl").write_text(re.sub(r"1\.0}\n$", '"NaN"}\n', text))
    result = compare_runs(settings(runs[0], lost, json=True))
    assert json.loads(capsys.readouterr().out) == result
    assert result["comparisons"][0]["train/loss"]["final"]["other"]["center"] == "NaN"
    assert result["comparisons"][0]["train/loss"]["final"]["bands"] == "Infinity"


def test_a_folder_that_is_no_run_is_refused(runs, tmp_path):
    with pytest.raises(UsageError, match=rf"no run in {tmp_path}/none \(no config.toml\); wanted the folder that"):
        compare_runs(settings(runs[0], str(tmp_path / "none")))
    pathlib.Path(runs[1], "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match=r"full1 \(no metrics.jsonl\)"):
        compare_runs(settings(runs[0], runs[1]))


def test_damaged_settings_and_metrics_are_refused_by_file(runs):
    metrics = pathlib.Path(runs[2], "metrics.jsonl")
    metrics.write_text("damaged\n" + metrics.read_text())
    with pytest.raises(UsageError, match=r"metrics.jsonl, line 1 is damaged"):
        compare_runs(settings(runs[0], runs[2]))
    pathlib.Path(runs[3], "config.toml").write_text("sede = 3\n")
    with pytest.raises(UsageError, match=r"in .*half1/config.toml"):
        compare_runs(settings(runs[0], runs[3]))


def test_runs_of_different_tasks_are_refused(runs, tmp_path):
    other = make_run(tmp_path / "other", "--data.name cifar10", [1.0])
    with pytest.raises(UsageError, match=r"runs of different tasks: data.name is digits in .*full0 and cifar10 in"):
        compare_runs(settings(runs[0], other))


def test_runs_of_one_group_alone_are_refused(runs):
    with pytest.raises(UsageError, match="all runs have the same settings but for the seed"):
        compare_runs(settings(*runs[:2]))


def test_a_run_given_twice_is_refused(runs):
    with pytest.raises(UsageError, match="full0/. is given twice: wanted different runs"):
        compare_runs(settings(*runs, f"{runs[0]}/."))


def test_a_missing_metric_is_refused(runs):
    with pytest.raises(UsageError, match="full0 has no test/accuracy in its metrics.jsonl: it has train/loss"):
        compare_runs(settings(*runs, metrics=("test/accuracy",)))


def test_the_command_exits_with_2_and_a_message(runs, capsys):
    assert cli.compare([runs[0], "none"]) == 2
    assert (
        capsys.readouterr().err == "error: no run in none (no config.toml); wanted the folder that train.py printed\n"
    )
    assert cli.compare([runs[0]]) == 2
    assert "error: 1 run to compare" in capsys.readouterr().err
    assert cli.compare([*runs, "--metrics", "train/loss", "--plot="]) == 0


def test_help_lists_every_field_and_neither_help_nor_a_comparison_imports_jax(runs):
    def command(*arguments):
        words = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "compare.py"), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
        return done.stdout, set(re.findall(r"\|\s+([\w.]+)$", done.stderr, flags=re.MULTILINE))

    out, imported = command("--help")
    flags = {f"--{field.name}" for field in dataclasses.fields(Compare)} - {"--runs"}
    assert not flags - set(re.findall(r"--[\w.]+", out))
    assert not {"jax", "flax", "numpy", "matplotlib"} & imported
    out, imported = command(*runs, "--metrics", "train/loss", "--plot=", "--json")
    assert json.loads(out)["groups"]
    assert not {"jax", "flax"} & imported


@pytest.mark.slow
def test_real_runs_of_two_policies_and_two_seeds_agree_within_their_seeds(tmp_path, capsys):
    flags = "--model.name mlp --model.width 8 --data.name digits --steps 20 --loop.log_every 5 --loop.eval_every 10"
    folders = []
    for policy in ("float32", "mixed_float16"):
        for seed in (0, 1):
            folders.append(str(tmp_path / f"{policy}{seed}"))
            given = f"{flags} --precision.policy {policy} --seed {seed} --output_dir {folders[-1]}"
            mpjax.run(load_config([*given.split(), "--report.no_plot", "--report.no_tensorboard"]))
    capsys.readouterr()
    result = compare_runs(Compare(runs=tuple(folders), plot=str(tmp_path / "a.png"), json=True))
    assert json.loads(capsys.readouterr().out) == result
    assert [group["seeds"] for group in result["groups"]] == [[0, 1], [0, 1]]
    (found,) = result["comparisons"]
    assert set(found) == {"train/loss", "test/accuracy", "train/loss_scale", "train/grad_norm"}
    assert found["train/loss"]["parts_at"] is None
    assert abs(found["train/loss"]["final"]["bands"]) < 0.5
    scale = found["train/loss_scale"]
    assert (scale["final"]["reference"]["center"], scale["final"]["other"]["center"]) == (1.0, 32768.0)
    assert (scale["parts_at"], scale["by_design"]) == (None, True)
    assert (
        "train/loss_scale: one policy scales the loss and the other does not; no difference to judge"
        in (result["evidence"][0])
    )
    assert (tmp_path / "a.png").stat().st_size > 5_000


@pytest.mark.parametrize("name", IRRELEVANT)
def test_what_makes_no_difference_are_settings(name):
    value = Config()
    for part in filter(None, name.split(".")):
        value = getattr(value, part)
    assert value is not None
