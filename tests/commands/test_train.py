"""Whole runs: what they leave behind, how they go on, how they end."""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.commands import build_run, evaluate_run, run
from mpjax.config import Evaluation, load_config, parse_duration, to_toml
from mpjax.errors import CheckpointWarning, Diverged, Interrupted, PrecisionWarning, UsageError
from mpjax.loop import complete_checkpoints, read_checkpoint
from mpjax.precision import check_dtypes
from mpjax.report import read_metrics
from mpjax.training import make_mesh


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 20 --optimizer.name adamw --optimizer.learning_rate 0.01 --optimizer.warmup 2 --training.ema 0.9
--loop.log_every 3 --loop.eval_every 5 --loop.save_every 7 --loop.keep 9 --report.no_tensorboard --report.no_plot
--precision.initial_scale 16777216 --precision.growth_interval 4
""")

TIMES = ("time", "train/examples_per_second")


def train(folder, *flags):
    return run(load_config([*SMALL, "--output_dir", str(folder), *flags]))


def resume(folder, *flags):
    return run(load_config(["--resume", "--output_dir", str(folder), *flags]))


def metrics_of(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def assert_same_arrays(folder, other, which):
    (position, one, _), (_, two, _) = (read_checkpoint(f / "checkpoints", str(which)) for f in (folder, other))
    assert position == which
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Twenty steps in float16, of which the first overflow, and its summary."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return folder, train(folder)


@pytest.fixture
def stopped(undisturbed, tmp_path):
    """The run as it would be had it been killed after its checkpoint of step 7, in the middle of a line."""
    folder = tmp_path / "stopped"
    shutil.copytree(undisturbed[0], folder)
    for position in (14, 20):
        shutil.rmtree(folder / "checkpoints" / str(position))
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 12]
    assert len(kept) < len(lines)
    (folder / "metrics.jsonl").write_text("".join(kept) + '{"step": 14, "ti')
    return folder


@pytest.mark.slow
def test_layers_are_read_at_their_steps_and_change_nothing(undisturbed, tmp_path):
    folder, _ = undisturbed
    train(tmp_path / "watched", "--diagnosis.every", "8")
    records = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    read = {record["step"]: record["layers"] for record in records if "layers" in record}
    assert list(read) == [8, 16]
    assert list(read[8]) == ["forward", "backward", "gradient", "update"]
    assert read[8]["update"].keys() == read[8]["gradient"].keys()
    assert {"layers/0", "layers/1", "head"} <= read[16]["forward"].keys()
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)
    assert_same_arrays(folder, tmp_path / "watched", 20)
    unread = [record for record in metrics_of(tmp_path / "watched") if "layers" not in record]
    assert unread == metrics_of(folder)


def test_a_run_leaves_settings_environment_metrics_summary_and_checkpoints(undisturbed):
    folder, summary = undisturbed
    files = {"config.toml", "environment.json", "history.jsonl", "metrics.jsonl", "receipt.json", "summary.json"}
    assert {path.name for path in folder.iterdir()} == {*files, "checkpoints"}
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (folder / "config.toml").read_text() == to_toml(load_config([*SMALL, "--output_dir", str(folder)]))
    assert complete_checkpoints(folder / "checkpoints") == [7, 14, 20]
    assert [record["step"] for record in metrics_of(folder) if "train/loss" in record] == [
        3,
        5,
        6,
        7,
        9,
        10,
        12,
        14,
        15,
        18,
        20,
    ]
    assert [record["step"] for record in metrics_of(folder) if "test/loss" in record] == [5, 10, 15, 20]


def test_the_summary_counts_what_was_applied_and_what_was_skipped(undisturbed):
    _, summary = undisturbed
    assert summary["attempts"] == 20
    assert summary["skipped"] > 0
    assert summary["steps"] == 20 - summary["skipped"]
    assert {"train/loss", "test/accuracy", "test/loss", "ema/accuracy", "best/test/accuracy"} <= summary.keys()
    assert summary["parameters"] == 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
    assert summary["train/loss_scale"] < 2**24


@pytest.mark.slow
def test_a_run_without_a_report_draws_and_writes_no_events_and_with_one_does(tmp_path):
    flags = "--steps 3 --report.plot --report.plot_format svg pdf --report.tensorboard --optimizer.warmup 1"
    train(tmp_path / "a", *flags.split())
    assert sorted(file.name for file in (tmp_path / "a").glob("curves.*")) == ["curves.pdf", "curves.svg"]
    assert "<!-- mlp on synthetic:8x8x1:10, mixed_float16 -->" in (tmp_path / "a" / "curves.svg").read_text()
    assert len(list((tmp_path / "a" / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_rerunning_the_config_reproduces_the_metrics(undisturbed, tmp_path):
    folder, _ = undisturbed
    run(load_config(["--config", str(folder / "config.toml"), "--output_dir", str(tmp_path / "again")]))
    assert metrics_of(tmp_path / "again") == metrics_of(folder)
    assert_same_arrays(tmp_path / "again", folder, 20)


@pytest.mark.slow
def test_another_seed_gives_another_run(undisturbed, tmp_path):
    train(tmp_path / "other", "--seed", "1", "--steps", "3", "--optimizer.warmup", "1")
    assert metrics_of(tmp_path / "other")[0]["train/loss"] != metrics_of(undisturbed[0])[0]["train/loss"]


@pytest.mark.slow
def test_a_resumed_run_ends_bit_identical(undisturbed, stopped):
    """Steps 8 to 20 with every array, the scale and its counters, and the metrics but for times."""
    summary = resume(stopped)
    # Time is that of all processes, up to the checkpoint from which it went on.
    before = read_checkpoint(undisturbed[0] / "checkpoints", "7")[2]
    assert 0 < before["compile_seconds"] < before["seconds"]
    assert summary["compile_seconds"] > before["compile_seconds"]
    assert summary["seconds"] > before["seconds"]
    for position in (14, 20):
        assert_same_arrays(stopped, undisturbed[0], position)
    assert metrics_of(stopped) == metrics_of(undisturbed[0])
    assert {name: summary[name] for name in ("attempts", "skipped", "test/loss", "best/step")} == {
        name: undisturbed[1][name] for name in ("attempts", "skipped", "test/loss", "best/step")
    }


@pytest.mark.slow
def test_a_resumed_run_says_what_it_does_otherwise(stopped, capsys):
    resume(stopped, "--seed", "1", "--optimizer.learning_rate", "0.03", "--steps", "8")
    printed = capsys.readouterr().out
    assert "resumed with another seed: 1, before 0" in printed
    assert "resumed with another optimizer.learning_rate: 0.03, before" in printed
    assert printed.count("resumed with another") == 2


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_ends_as_undisturbed(undisturbed, stopped):
    damaged = stopped / "checkpoints" / "14"
    shutil.copytree(undisturbed[0] / "checkpoints" / "14", damaged)
    about = damaged / "about" / "data.json"
    about.write_text(about.read_text().replace("dynamic", "dynamix", 1))
    with pytest.warns(CheckpointWarning, match="14 is damaged .* using .*/7 instead$"):
        resume(stopped)
    for position in (14, 20):
        assert_same_arrays(stopped, undisturbed[0], position)
    assert (stopped / "checkpoints" / "14.damaged").is_dir()


def test_an_empty_config_is_refused(stopped):
    (stopped / "config.toml").write_text("")
    with pytest.raises(UsageError, match="config.toml: the file is empty; wanted settings"):
        resume(stopped)
    with pytest.raises(UsageError, match="config.toml: the file is empty"):
        evaluate_run(Evaluation(run=str(stopped)))


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_told(undisturbed, tmp_path):
    train(tmp_path / "other", "--seed", "1", "--steps", "3", "--optimizer.warmup", "1", "--loop.save_every", "3")
    folder = shutil.copytree(undisturbed[0], tmp_path / "mixed")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "3", folder / "checkpoints" / "99")
    with pytest.warns(CheckpointWarning, match="checkpoint 99 of .* may be of another run: .*: seed 1, not 0"):
        evaluate_run(Evaluation(run=str(folder), checkpoint="latest"))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["1", "0"], ids=["on the device", "stacked"])
def test_several_steps_in_a_call_are_the_same_run(undisturbed, tmp_path, memory):
    """As near as two programs come to each other, skipped steps included; evaluated and saved after the same steps."""
    summary = train(tmp_path / "calls", "--training.steps_per_call", "3", "--data.on_device_mb", memory)
    assert complete_checkpoints(tmp_path / "calls" / "checkpoints") == [7, 14, 20]
    assert summary["skipped"] == undisturbed[1]["skipped"]
    mine, other = (
        [record for record in metrics_of(folder) if "test/loss" in record]
        for folder in (tmp_path / "calls", undisturbed[0])
    )
    assert [record["step"] for record in mine] == [record["step"] for record in other] == [5, 10, 15, 20]
    np.testing.assert_allclose(
        [record["test/loss"] for record in mine], [record["test/loss"] for record in other], rtol=1e-3
    )


@pytest.mark.slow
def test_a_run_of_several_steps_in_a_call_resumes_bit_identical(tmp_path):
    flags = ("--training.steps_per_call", "3")
    train(tmp_path / "whole", *flags)
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for position in (14, 20):
        shutil.rmtree(folder / "checkpoints" / str(position))
    resume(folder)
    assert_same_arrays(folder, tmp_path / "whole", 20)


@pytest.mark.slow
def test_a_run_on_one_device_packs_its_state_and_resumes_bit_identical(tmp_path, monkeypatch):
    """Steps that overflow included; checkpoints have arrays by path."""
    one_device = functools.partial(make_mesh, jax.devices()[:1])
    monkeypatch.setattr("mpjax.commands.build.make_mesh", one_device)
    assert build_run(load_config(SMALL)).packing.params.groups
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole)
    shutil.copytree(whole, stopped)
    for position in (14, 20):
        shutil.rmtree(stopped / "checkpoints" / str(position))
    resume(stopped)
    assert_same_arrays(stopped, whole, 20)
    assert metrics_of(stopped) == metrics_of(whole)
    assert "params/layers/0/bias" in read_checkpoint(whole / "checkpoints", "20")[1]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["stochastic", "kahan"])
def test_a_run_without_float32_copies_or_moments_resumes_bit_identical_and_as_any_other(tmp_path, weights):
    """Steps that overflow included. What it has kept is there for a run of other settings, too."""
    half = ("--precision.policy", "float16", "--precision.master_weights", weights)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    summary = train(whole, *half, "--optimizer.moments", "float8", "--model.width", "64")
    assert summary["skipped"] > 0
    shutil.copytree(whole, stopped)
    for position in (14, 20):
        shutil.rmtree(stopped / "checkpoints" / str(position))
    resume(stopped)
    assert_same_arrays(stopped, whole, 20)
    _, arrays, _ = read_checkpoint(whole / "checkpoints", "20")
    moments = [name for name in arrays if name.endswith("mu/layers/0/kernel/values")]
    assert [str(arrays[name].dtype) for name in moments] == ["float8_e4m3fn"]
    assert not [name for name in arrays if "/masters/" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)  # that something starts afresh
        resume(stopped, "--precision.master_weights", "on", "--optimizer.moments", "float32", "--steps", "21")


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--data.in_memory_mb 0", "--training.steps_per_call 4"], ids=["stream", "device"])
def test_a_run_on_a_mixture_resumes_bit_identical(tmp_path, flags):
    (tmp_path / "more.py").write_text(
        "from mpjax.data import synthetic_source\ndef source(): return synthetic_source(10, (8, 8, 1), 5, seed=1)\n"
    )
    flags = ["--data.mix", f"{tmp_path / 'more.py'}:source", "0.4", *flags.split()]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, *flags)
    shutil.copytree(whole, stopped)
    for position in (14, 20):
        shutil.rmtree(stopped / "checkpoints" / str(position))
    with pytest.raises(UsageError, match=r"names code outside mpjax, .* data.mix .*more.py:source"):
        resume(stopped)
    resume(stopped, "--trust_code")
    assert_same_arrays(whole, stopped, 20)
    epochs = parse_duration("2 epochs")
    assert build_run(dataclasses.replace(load_config([*SMALL, *flags]), steps=epochs)).when.steps == 6  # of 26 examples

    # What is evaluated is the first set's, also where there is no other.
    metrics = evaluate_run(Evaluation(run=str(whole), checkpoint="latest", trust_code=True))
    (tmp_path / "more.py").unlink()
    assert evaluate_run(Evaluation(run=str(whole), checkpoint="latest", trust_code=True)) == metrics
    assert metrics["test/loss"] == pytest.approx(metrics_of(whole)[-1]["test/loss"])


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again(undisturbed, stopped):
    """What was being written when it was killed is no checkpoint."""
    (stopped / "checkpoints" / "7").rename(stopped / "checkpoints" / "7.orbax-checkpoint-tmp")
    resume(stopped)
    assert_same_arrays(stopped, undisturbed[0], 20)
    assert metrics_of(stopped) == metrics_of(undisturbed[0])


@pytest.mark.slow
def test_resuming_takes_the_runs_own_settings_and_flags_override(stopped):
    summary = resume(stopped, "--steps", "9", "--training.label_smoothing", "0")
    assert summary["attempts"] == 9
    config = load_config(["--config", str(stopped / "config.toml")])
    assert (config.model.name, config.training.label_smoothing, str(config.steps)) == ("mlp", 0.0, "9")
    assert not config.resume


def test_resuming_a_finished_run_changes_nothing(undisturbed, tmp_path):
    folder = shutil.copytree(undisturbed[0], tmp_path / "finished")
    assert resume(folder)["attempts"] == 20
    assert metrics_of(folder) == metrics_of(undisturbed[0])


@pytest.mark.slow
def test_a_run_goes_on_under_other_policies(undisturbed, tmp_path):
    folder = shutil.copytree(undisturbed[0], tmp_path / "policies")
    for steps, policy in enumerate(("float16", "mixed_bfloat16", "float32"), start=21):
        summary = resume(folder, "--steps", str(steps), "--precision.policy", policy, "--loop.eval_every", "0")
        assert summary["attempts"] == steps
        assert np.isfinite(summary["train/loss"])
        _, arrays, about = read_checkpoint(folder / "checkpoints")
        stored = "float32" if policy.startswith(("mixed", "float32")) else policy
        params = {name: value for name, value in arrays.items() if name.startswith("params/")}
        check_dtypes(params, stored, name=policy)
        assert about["policy"].startswith(f"params={stored},compute={policy.removeprefix('mixed_')},")


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["--precision.stochastic_rounding", "--precision.no_stochastic_rounding"])
def test_a_float16_run_keeps_float32_masters_in_its_checkpoints_and_goes_on_from_them(tmp_path, rounding):
    flags = ("--precision.policy", "float16", "--steps", "8", "--loop.save_every", "4", "--loop.eval_every", "0")
    flags += ("--precision.initial_scale", "1024")
    train(tmp_path / "a", *flags, rounding)
    _, arrays, _ = read_checkpoint(tmp_path / "a" / "checkpoints", "4")
    masters = {name: value for name, value in arrays.items() if "/masters/" in name}
    params = {name: value for name, value in arrays.items() if name.startswith("params/")}
    assert len(masters) == len(params) == 6
    check_dtypes(masters, "float32", name="masters")
    check_dtypes(params, "float16", name="parameters")
    assert any(np.any(value != value.astype(np.float16)) for value in masters.values())
    assert ("opt_state/inner_state/roundings" in arrays) == (rounding == "--precision.stochastic_rounding")
    folder = shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(folder / "checkpoints" / "8")
    resume(folder)
    assert_same_arrays(folder, tmp_path / "a", 8)


@pytest.mark.slow
def test_a_run_under_autocast_keeps_float32_and_goes_on_under_another_mode(tmp_path):
    train(tmp_path / "a", "--precision.mode", "autocast", "--precision.rules", "head", "float32", "--steps", "7")
    _, arrays, about = read_checkpoint(tmp_path / "a" / "checkpoints", "7")
    check_dtypes(arrays, "float32", name="checkpoint")
    assert about["policy"].endswith(";head=float32")
    assert resume(tmp_path / "a", "--precision.mode", "module", "--steps", "9")["attempts"] == 9


@pytest.mark.slow
def test_a_checkpoint_without_scaler_state_loads_with_a_warning(stopped, monkeypatch):
    def without_scaler(*args, **options):
        position, arrays, about = read_checkpoint(*args, **options)
        return position, {name: value for name, value in arrays.items() if name != "opt_state/scale"}, about

    monkeypatch.setattr("mpjax.commands.build.read_checkpoint", without_scaler)
    with pytest.warns(PrecisionWarning, match="has no loss-scale state: the scale starts at its initial value"):
        resume(stopped, "--steps", "8")
    assert float(read_checkpoint(stopped / "checkpoints")[1]["opt_state/scale"]) in (2.0**24, 2.0**23)


def test_another_model_is_refused_with_all_faults(stopped):
    before = metrics_of(stopped), (stopped / "config.toml").read_text()
    with pytest.raises(UsageError) as raised:
        resume(stopped, "--model.depth", "1", "--model.width", "4")
    message = str(raised.value)
    assert message.startswith("the checkpoint is of another model:")
    assert "unexpected: params/layers/1/kernel" in message
    assert "shape: params/head/kernel is (8, 10), wanted (4, 10)" in message
    assert message.endswith(
        "these settings are others:\n  --model.depth is 1, before 0\n  --model.width is 4, before 8"
    )
    assert (metrics_of(stopped), (stopped / "config.toml").read_text()) == before


@pytest.mark.slow
def test_the_best_and_the_newest_checkpoints_are_kept_over_a_resumption(tmp_path):
    flags = (
        "--loop.keep",
        "1",
        "--loop.eval_every",
        "10",
        "--loop.save_every",
        "10",
        "--optimizer.schedule",
        "constant",
    )
    train(tmp_path / "a", *flags, "--steps", "200")
    resume(tmp_path / "a", "--steps", "220", "--optimizer.learning_rate", "30")
    tested = {r["step"]: r["test/accuracy"] for r in metrics_of(tmp_path / "a") if "test/accuracy" in r}
    best = max(tested, key=lambda step: (tested[step], step))
    assert complete_checkpoints(tmp_path / "a" / "checkpoints") == [best, 220]
    assert best <= 200
    assert read_checkpoint(tmp_path / "a" / "checkpoints", "best")[0] == best


@pytest.mark.slow
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, 2), (signal.SIGTERM, 15)])
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_ends_as_undisturbed(
    undisturbed, tmp_path, monkeypatch, number, word
):
    from mpjax.loop import When

    due = When.due

    def at_step_9(self, interval, position):
        if position == 9 and interval == self.log:
            os.kill(os.getpid(), number)
        return due(self, interval, position)

    with monkeypatch.context() as patched:
        patched.setattr(When, "due", at_step_9)
        with pytest.raises(Interrupted, match="stopped at step 10; the checkpoint is saved") as raised:
            train(tmp_path / "a")
    assert raised.value.signal_number == word
    assert complete_checkpoints(tmp_path / "a" / "checkpoints") == [7, 10]
    resume(tmp_path / "a")
    assert_same_arrays(tmp_path / "a", undisturbed[0], 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason", "layer"),
    [
        # No scale is small enough: the gradients of the head overflow in float16 at 2^24 already.
        (
            ("--precision.min_scale", "16777216", "--precision.patience", "3"),
            "training diverged at step 3: gradients were not finite 3 steps in a row, the last at the smallest loss "
            "scale 1.67772e+07",
            "first bad layer: head (backward)",
        ),
        # A rate at which weights leave float16 in the first step: then the forward pass overflows at any scale.
        (
            ("--optimizer.learning_rate", "1e4", "--optimizer.warmup", "0", "--precision.initial_scale", "1"),
            "the last at the smallest loss scale 1",
            "first bad layer: layers/0 (forward)",
        ),
        # The first with casts at each operation.
        (
            ("--precision.policy", "O1", "--precision.min_scale", "16777216", "--precision.patience", "3"),
            "the last at the smallest loss scale 1.67772e+07",
            "first bad layer: head (backward)",
        ),
        (
            ("--precision.policy", "float32", "--optimizer.learning_rate", "1e30", "--optimizer.name", "sgd"),
            "loss is nan",
            "first bad layer: layers/1 (forward)\nverdict: not_precision",
        ),
    ],
)
def test_a_run_that_stays_non_finite_ends_with_the_first_bad_layer(tmp_path, flags, reason, layer):
    with pytest.raises(Diverged) as raised:
        train(tmp_path / "a", *flags, "--training.ema", "0")
    assert reason in str(raised.value)
    assert layer in str(raised.value), str(raised.value)
    assert list((tmp_path / "a").glob("diagnosis_*.html"))
    assert not (tmp_path / "a" / "summary.json").exists()
    for position in complete_checkpoints(tmp_path / "a" / "checkpoints"):
        arrays = read_checkpoint(tmp_path / "a" / "checkpoints", str(position))[1]
        assert all(np.isfinite(value.astype(jnp.float32)).all() for value in arrays.values())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--data.mean", "0.5", "0.5"), "data.mean: got 2 values"),
        (("--data.batch_size", "9"), "a batch of 9 examples does not divide among 2 devices x 1 micro-batches"),
        (("--training.accumulate", "3"), "take a multiple of 6, such as 6"),
        (("--precision.rules", "layer/0", "float32"), "rule 'layer/0' matches nothing; nearest: layers/0"),
        (("--precision.loss_scale", "3"), "--precision.loss_scale 3 contradicts --precision.initial_scale 16777216"),
        (("--precision.min_scale", "3"), "power of two"),
        (("--data.name", "mnst"), "data set 'mnst' is not prepared"),
        (("--data.name", "synthetic:8x8"), "wanted synthetic:HEIGHTxWIDTHxCHANNELS:CLASSES, as in"),
    ],
)
def test_settings_that_cannot_be_leave_no_folder(tmp_path, flags, says):
    with pytest.raises(UsageError) as raised:
        train(tmp_path / "a", *flags)
    assert says in str(raised.value)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_advice_is_given_at_the_start(tmp_path, capsys):
    """A scaler that bfloat16 does not need; a CPU without fast halves."""
    flags = ("--precision.policy", "mixed_bfloat16", "--precision.loss_scale", "dynamic", "--steps", "3")
    train(tmp_path / "a", *flags, "--optimizer.warmup", "1")
    out = capsys.readouterr().out
    assert "loss scaling is not needed" in out
    assert "a CPU has no fast bfloat16" in out


@pytest.mark.slow
def test_accumulation_in_a_run_is_that_of_the_whole_batch(tmp_path):
    flags = ("--precision.policy", "float32", "--data.crop_padding", "0", "--steps", "4", "--loop.log_every", "1")
    for count in (1, 4):
        train(tmp_path / str(count), *flags, "--training.accumulate", str(count))
    one, four = ([r["train/loss"] for r in metrics_of(tmp_path / n) if "train/loss" in r] for n in ("1", "4"))
    assert len(one) == 4
    assert four == pytest.approx(one, rel=1e-5)


TWO_BLOCKS = """
from mpjax.models.resnet import BasicBlock, ResNet, SmallStem

def resnet(fields, *, rngs):
    return ResNet((1, 1), BasicBlock, SmallStem, channels=1, width=4, num_classes=10, rngs=rngs)
"""


@pytest.mark.slow
def test_a_resnet_on_the_digits_resumes_bit_identical(tmp_path):
    """With batch statistics, augmentation and a set of several hundred steps an epoch."""
    (tmp_path / "net.py").write_text(TWO_BLOCKS)
    flags = ("--model.name", f"{tmp_path / 'net.py'}:resnet", "--model.width", "0", "--data.name", "digits")
    train(tmp_path / "a", *flags, "--loop.eval_every", "0")
    folder = shutil.copytree(tmp_path / "a", tmp_path / "b")
    for position in (14, 20):
        shutil.rmtree(folder / "checkpoints" / str(position))
    resume(folder, "--trust_code")
    assert_same_arrays(folder, tmp_path / "a", 20)
    assert metrics_of(folder) == metrics_of(tmp_path / "a")


@pytest.mark.slow
class Recorder:
    """A writer of a user."""

    def __init__(self, folder):
        self.folder, self.steps, self.told, self.layered = folder, [], [], 0

    def write(self, step, metrics):
        self.steps.append((step, min(metrics).partition("/")[0]))

    def saved(self, step):
        self.told.append(step)

    def layers(self, step, layers):
        self.layered += 1

    def message(self, text):
        self.told.append(text)

    def close(self):
        self.told.append(complete_checkpoints(self.folder / "checkpoints"))


@pytest.mark.slow
def test_a_users_writer_receives_what_the_runs_own_do(undisturbed, tmp_path):
    writer = Recorder(tmp_path / "run")
    run(load_config([*SMALL, "--output_dir", str(writer.folder)]), writers=[writer])
    assert metrics_of(writer.folder) == metrics_of(undisturbed[0])
    assert [step for step, _ in writer.steps] == [record["step"] for record in metrics_of(undisturbed[0])]
    assert {kind for _, kind in writer.steps} == {"train", "ema"}
    assert writer.told[0] == f"run folder: {writer.folder}"
    assert [told for told in writer.told if not isinstance(told, str)] == [7, 14, 20, [7, 14, 20]]


def test_a_run_is_stopped_by_what_its_caller_passes(tmp_path):
    @contextlib.contextmanager
    def at_once(stop):
        stop.ask(signal.SIGTERM)
        yield

    with pytest.raises(Interrupted, match="stopped at step 1; the checkpoint is saved") as raised:
        run(load_config([*SMALL, "--output_dir", str(tmp_path / "run")]), stopping=at_once)
    assert raised.value.signal_number == signal.SIGTERM
    assert complete_checkpoints(tmp_path / "run" / "checkpoints") == [1]


@pytest.mark.slow
def test_a_profile_is_left_for_tensorboard(tmp_path):
    train(tmp_path / "a", "--steps", "12", "--profile")
    (traced,) = (tmp_path / "a" / "tensorboard" / "plugins" / "profile").iterdir()
    assert any(file.name.endswith(".xplane.pb") and file.stat().st_size > 1000 for file in traced.iterdir())


@pytest.mark.slow
def test_a_profile_of_a_short_run_ends_with_it(tmp_path):
    train(tmp_path / "a", "--steps", "7", "--profile")
    assert (tmp_path / "a" / "tensorboard" / "plugins" / "profile").is_dir()
    train(tmp_path / "b", "--steps", "3", "--profile")
    assert (tmp_path / "b" / "tensorboard" / "plugins" / "profile").is_dir()


@pytest.mark.slow
def test_a_run_is_traced_when_it_is_asked_for_and_not_each_time_it_goes_on(tmp_path):
    # In a process of its own: the profiler hooks into every thread of its process.
    command = [sys.executable, "-c", "import sys; from mpjax.cli import train; sys.exit(train(sys.argv[1:]))"]
    flags = [*SMALL, "--output_dir", str(tmp_path / "a"), "--steps", "3", "--profile"]
    subprocess.run([*command, *flags], check=True, capture_output=True)
    assert list((tmp_path / "a" / "tensorboard").rglob("*.xplane.pb"))
    assert "profile = false" in (tmp_path / "a" / "config.toml").read_text()


@pytest.mark.slow
def test_a_resume_without_a_checkpoint_says_that_it_starts_anew(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed[0], tmp_path / "a", ignore=shutil.ignore_patterns("checkpoints"))
    resume(tmp_path / "a", "--steps", "1")
    said = capsys.readouterr().out
    assert "no checkpoint to resume from: starting at step 0" in said
    assert "resumed from" not in said
