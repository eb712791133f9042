"""A run on preferences: it learns to prefer, and its commands read it."""

import json

import pytest

from mpjax.commands import evaluate_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Prediction, load_config
from mpjax.errors import UsageError


pytestmark = pytest.mark.extra


@pytest.fixture
def flags(chat_flags, tmp_path):
    """The arguments of a run that learns to prefer `yes`."""
    rows = [{"prompt": letter, "chosen": "yes", "rejected": "no"} for letter in "abcd" * 4]
    rule = "--optimizer.name adamw --optimizer.learning_rate 0.05 --optimizer.warmup 1"
    return [*chat_flags("preference", rows, steps=12), *rule.split(), "--output_dir", str(tmp_path / "run")]


def test_every_command_reads_a_run_of_preferences(flags, tmp_path, capsys):
    train(load_config([*flags, "--training.lora", "blocks/*", "--training.beta", "0.5"]))
    run = str(tmp_path / "run")
    metrics = evaluate_run(Evaluation(run=run))
    assert metrics["test/accuracy"] == 1.0
    assert metrics["test/margin"] == pytest.approx(metrics["test/chosen"] - metrics["test/rejected"], rel=1e-4)
    capsys.readouterr()
    predict_run(Prediction(run=run, split="train[8:]"))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(row["margin"] for row in rows) / 8 == pytest.approx(metrics["test/margin"], rel=1e-4)
    predict_run(Prediction(run=run, prompt=("a",), json=True, max_tokens=2))
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["prompt"] == "a"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            [],
            'the model without its adapters: write --training.lora with patterns of layers, as in --training.lora "blo',
        ),
        (
            ["--training.lora", "blocks/*", "--training.lora_trained", "head"],
            "--training.lora_trained head with --task",
        ),
        (
            ["--training.lora", "blocks/*", "--training.chunked_loss", "8"],
            "chunked_loss 8 is not for --task preference",
        ),
        (["--training.lora", "blocks/*", "--training.beta", "0"], "--training.beta is 0.0: wanted a positive number"),
    ],
)
def test_what_a_preference_cannot_use_is_an_error(flags, more, says):
    with pytest.raises(UsageError, match=says):
        train(load_config([*flags, *more]))
