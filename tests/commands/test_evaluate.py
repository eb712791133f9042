"""Checkpoints measured: by themselves as in the run, or under another policy, split or average."""

import json

import pytest

from mpjax.commands import evaluate_run, predict_run, run
from mpjax.config import Evaluation, Prediction, load_config, save_config
from mpjax.errors import UsageError
from mpjax.report import read_metrics


@pytest.fixture(scope="module")
def trained(folder_of):
    """A run whose best checkpoint is not its last: the rate is far too high at the end."""
    folder = folder_of(
        "--steps 60 --optimizer.learning_rate 0.02 --optimizer.schedule constant --training.ema 0.9 "
        "--loop.eval_every 30 --loop.save_every 30 --data.eval_batch_size 100"
    )
    run(load_config(f"--resume --output_dir {folder} --optimizer.learning_rate 5 --steps 62".split()))
    return folder


def recorded(folder, step):
    tested = [record for record in read_metrics(folder / "metrics.jsonl") if "test/loss" in record]
    return {name: value for record in tested if record["step"] == step for name, value in record.items() if "/" in name}


@pytest.mark.parametrize(
    ("which", "step"),
    [("best", 60), ("latest", 62), pytest.param("60", 60, marks=pytest.mark.slow)],
)
def test_a_checkpoint_measures_as_it_did_in_the_run(trained, which, step):
    metrics = evaluate_run(Evaluation(run=str(trained), checkpoint=which, ema=True))
    assert metrics == recorded(trained, step)
    assert set(metrics) == {"test/loss", "test/accuracy", "ema/loss", "ema/accuracy"}


def test_the_moving_average_is_measured_if_asked_for(trained):
    assert set(evaluate_run(Evaluation(run=str(trained)))) == {"test/loss", "test/accuracy"}


@pytest.mark.parametrize("policy", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_another_policy_measures_nearly_the_same(trained, policy):
    metrics = evaluate_run(Evaluation(run=str(trained), policy=policy, checkpoint="60"))
    own = recorded(trained, 60)
    assert metrics["test/loss"] == pytest.approx(own["test/loss"], rel=0.02)
    assert metrics["test/loss"] != own["test/loss"]
    assert metrics["test/accuracy"] == pytest.approx(own["test/accuracy"], abs=0.02)


def test_float16_stores_what_mixed_float16_computes_with(trained):
    metrics = evaluate_run(Evaluation(run=str(trained), policy="float16", checkpoint="60"))
    assert metrics["test/loss"] == pytest.approx(recorded(trained, 60)["test/loss"], rel=1e-6)


@pytest.fixture(scope="module")
def autocast(folder_of):
    """A run with casts at each operation."""
    return folder_of("--precision.policy O1 --steps 20 --loop.eval_every 20")


@pytest.mark.slow
def test_a_run_under_autocast_is_measured_under_autocast_or_under_another_policy(autocast):
    own = recorded(autocast, 20)
    assert evaluate_run(Evaluation(run=str(autocast))) == own
    assert evaluate_run(Evaluation(run=str(autocast), policy="O1")) == own
    full = evaluate_run(Evaluation(run=str(autocast), policy="float32"))
    assert full["test/loss"] == pytest.approx(own["test/loss"], rel=0.01)
    assert full["test/loss"] != own["test/loss"]


def test_another_split_is_other_examples(trained):
    metrics = evaluate_run(Evaluation(run=str(trained), split="train[:100]", checkpoint="60"))
    assert (metrics["test/accuracy"] * 100) % 1 == pytest.approx(0, abs=1e-4)


def test_the_result_is_printed_for_people_or_for_programs(trained, capsys):
    metrics = evaluate_run(Evaluation(run=str(trained), json=True, checkpoint="60"))
    policy = "params=float32,compute=float16,output=float32"
    assert json.loads(capsys.readouterr().out) == {"checkpoint": 60, "policy": policy, **metrics}
    evaluate_run(Evaluation(run=str(trained), policy="float32", checkpoint="60"))
    lines = capsys.readouterr().out.splitlines()
    under = "evaluated under params=float32,compute=float32,output=float32"
    assert lines[0] == f"checkpoint 60 of {trained}, trained under {policy}, {under}"
    assert [line.split()[0] for line in lines[1:]] == ["test/accuracy", "test/loss"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"checkpoint": "5"}, "no checkpoint '5': wanted latest, best or one of "),
        ({"split": "valid"}, "split 'valid' of 'digits/1.0.0'"),
        ({"policy": "flot16"}, "unknown precision policy 'flot16'"),
    ],
)
def test_what_is_not_there_is_refused(trained, settings, says):
    with pytest.raises(UsageError, match=says):
        evaluate_run(Evaluation(run=str(trained), **settings))


@pytest.mark.extra
@pytest.mark.parametrize(
    ("command", "settings"), [(evaluate_run, Evaluation), (predict_run, Prediction)], ids=["evaluate", "predict"]
)
def test_a_split_that_the_data_lacks_names_that_of_the_run(tmp_path, command, settings):
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    (tmp_path / "a.csv").write_text("text,label\n" + "one,0\ntwo,1\n" * 10)
    data = f"--task text_classification --data.name hf:{tmp_path}/a.csv --data.num_classes 2 --data.length 8"
    splits = ["--data.train_split", "train[:80%]", "--data.test_split", "train[80%:]"]
    save_config(load_config([*data.split(), *splits, "--model.name", "bert"]), tmp_path / "config.toml")
    with pytest.raises(UsageError) as error:
        command(settings(run=str(tmp_path), split="test"))
    said = "has only the split train (20 examples), not 'test'; write --split 'train[80%:]', which is the test split of"
    assert said in str(error.value)
    assert "--data." not in str(error.value)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=rf"no run in {tmp_path} \(no config.toml\); wanted the folder that train.py"):
        evaluate_run(Evaluation(run=str(tmp_path)))


def test_an_average_that_was_not_kept_is_refused(trained, tmp_path):
    text = (trained / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("ema = 0.9", "ema = 0.0"))
    with pytest.raises(UsageError, match=r"--ema: the run in .* kept no moving average \(training.ema is 0\)"):
        evaluate_run(Evaluation(run=str(tmp_path), ema=True))
