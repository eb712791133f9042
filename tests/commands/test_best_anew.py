"""The best checkpoint of a run that is resumed with settings or data by which its metrics mean something else."""

import shlex
import shutil
import warnings

import numpy as np
import pytest

from mpjax.commands import diagnose_run, evaluate_run, predict_run, run
from mpjax.config import Diagnose, Evaluation, Prediction, load_config
from mpjax.errors import CheckpointWarning, UsageError
from mpjax.loop import complete_checkpoints, read_checkpoint
from mpjax.report import read_metrics


FLAGS = shlex.split("""
--model.name mlp --model.width 8 --data.batch_size 20 --data.eval_batch_size 20 --precision.policy float32
--optimizer.name adamw --optimizer.learning_rate 0.01 --optimizer.schedule constant --optimizer.warmup 0 --steps 40
--loop.eval_every 10 --loop.save_every 10 --loop.keep 1 --report.no_tensorboard --report.no_plot
""")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder, and the summary of the run there, of 40 steps on bright and dark images, which it tells apart.

    In `b.npz` beside it, the labels are swapped.
    """
    folder = tmp_path_factory.mktemp("run")
    label = np.arange(100) % 2
    image = np.random.default_rng(0).uniform(0, 0.3, (100, 4, 4, 1)) + 0.6 * label[:, None, None, None]
    image = (255 * image).astype(np.uint8)
    for name, labels in (("a", label), ("b", 1 - label)):
        np.savez(folder / f"{name}.npz", image=image, label=labels)
    splits = ("--data.train_split", "train[:80]", "--data.test_split", "train[80:]")
    config = load_config([*FLAGS, *splits, "--data.name", f"{folder / 'a'}.npz", "--output_dir", f"{folder / 'run'}"])
    return folder, run(config)


@pytest.fixture
def resumed(begun, tmp_path):
    """A function that resumes a copy of that run with flags, and returns its folder and its summary."""

    def resume(*flags):
        folder = shutil.copytree(begun[0] / "run", tmp_path / "run")
        return folder, run(load_config(["--resume", "--output_dir", str(folder), *flags]))

    return resume


def test_the_best_of_the_summary_is_the_checkpoint_that_is_read_as_the_best(begun):
    """Several evaluations have the highest accuracy, and the checkpoint of the last of them is kept."""
    folder, summary = begun
    tested = {r["step"]: r["test/accuracy"] for r in read_metrics(folder / "run" / "metrics.jsonl") if "test/loss" in r}
    assert [step for step, value in tested.items() if value == 1.0][-2:] == [30, 40]
    assert (summary["best/test/accuracy"], summary["best/step"]) == (1.0, 40)
    assert read_checkpoint(folder / "run" / "checkpoints", "best")[0] == 40


def test_the_best_is_of_the_new_data_whatever_it_was_on_the_old(begun, resumed, capsys):
    data = str(begun[0] / "b.npz")
    flags = "--loop.stop_after", "2", "--optimizer.learning_rate", "0"
    folder, summary = resumed("--other_data", "--data.name", data, "--steps", "90", *flags)
    told = "the search for the best checkpoint begins anew after step 40: test: label has"
    assert told in capsys.readouterr().out
    # The first evaluation of the new data is its best, and two without a better one follow.
    assert (summary["attempts"], summary["best/test/accuracy"], summary["best/step"]) == (70, 0.0, 70)
    assert complete_checkpoints(folder / "checkpoints") == [70]
    with warnings.catch_warnings(action="error", category=CheckpointWarning):
        assert evaluate_run(Evaluation(run=str(folder)))["test/accuracy"] == 0.0


def test_an_older_checkpoint_is_read_on_the_data_of_now_and_says_so(begun, resumed):
    flags = "--other_data", "--data.name", str(begun[0] / "b.npz"), "--steps", "50", "--loop.keep", "2"
    folder, _ = resumed(*flags)
    with pytest.warns(CheckpointWarning, match="checkpoint 40 of .* is of before a change.*: test: label has .*latest"):
        assert evaluate_run(Evaluation(run=str(folder), checkpoint="40"))["test/accuracy"] == 0.0


def test_a_checkpoint_is_not_read_with_another_preprocessing_than_it_was_trained_with(resumed, tmp_path, capsys):
    folder, summary = resumed("--data.mean", "0.9", "--steps", "50", "--loop.keep", "2")
    assert "begins anew after step 40: data.mean [0.9], before [0.0]\n" in capsys.readouterr().out
    assert summary["best/step"] == 50
    said = r"checkpoint 40 of .* was trained with data.mean \[0.0\], and the run has \[0.9\] now: .*"
    with pytest.raises(UsageError, match=said + "write --checkpoint latest"):
        evaluate_run(Evaluation(run=str(folder), checkpoint="40"))
    output = str(tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match=said):
        predict_run(Prediction(run=str(folder), checkpoint="40", split="train[80:]", output=output))
    with pytest.raises(UsageError, match=said + "leave out --step"):
        diagnose_run(Diagnose(run=str(folder), evaluation=True, step=40))
    with warnings.catch_warnings(action="error", category=CheckpointWarning):
        evaluate_run(Evaluation(run=str(folder)))


def test_a_run_that_was_killed_before_its_next_checkpoint_does_not_read_the_last_with_its_new_settings(resumed):
    folder, _ = resumed("--data.mean", "0.9", "--steps", "50", "--loop.keep", "2")
    shutil.rmtree(folder / "checkpoints" / "50")
    with pytest.raises(UsageError, match=r"checkpoint 40 of .* the run has \[0.9\] now: .*; resume the run"):
        evaluate_run(Evaluation(run=str(folder)))


def test_the_search_goes_on_where_the_metric_means_the_same(resumed, capsys):
    """The rate is far too high, so that the last checkpoint is worse."""
    flags = "--precision.policy", "mixed_bfloat16", "--data.batch_size", "10", "--training.label_smoothing", "0.5"
    folder, summary = resumed("--steps", "50", "--optimizer.learning_rate", "100", *flags)
    assert "begins anew" not in capsys.readouterr().out
    assert '"best_anew"' not in (folder / "history.jsonl").read_text()
    assert summary["test/accuracy"] < 1.0
    assert (summary["best/test/accuracy"], summary["best/step"]) == (1.0, 40)
    assert complete_checkpoints(folder / "checkpoints") == [40, 50]
    with warnings.catch_warnings(action="error", category=CheckpointWarning):
        assert evaluate_run(Evaluation(run=str(folder), policy="float32"))["test/accuracy"] == 1.0


def test_another_metric_of_the_best_is_not_compared_with_the_one_before(resumed, capsys):
    """An accuracy of 1 is above every negated loss."""
    folder, summary = resumed("--steps", "50", "--loop.best", "loss")
    assert "begins anew after step 40: loop.best loss, before not set\n" in capsys.readouterr().out
    assert (summary["best/step"], read_checkpoint(folder / "checkpoints", "best")[0]) == (50, 50)
    assert summary["best/test/loss"] == summary["test/loss"]
