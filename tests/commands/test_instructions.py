"""A run on conversations: it learns answers, predicts them, and its commands read it."""

import json

import pytest

from mpjax.commands import evaluate_run, export_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Export, Prediction, load_config
from mpjax.errors import UsageError


pytestmark = pytest.mark.extra


@pytest.fixture
def flags(chat_flags):
    """The arguments of a run that learns to repeat a letter."""
    rows = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter}]}
        for letter in "abcd" * 4
    ]
    return chat_flags("instructions", rows, steps=2)


@pytest.fixture
def run(flags, tmp_path):
    """The folder of the run."""
    train(load_config([*flags, "--output_dir", str(tmp_path / "run")]))
    return str(tmp_path / "run")


def test_every_command_reads_a_run_of_instructions(run, tmp_path, capsys):
    def lines(**settings):
        capsys.readouterr()
        predict_run(Prediction(run=run, **settings))
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    metrics = evaluate_run(Evaluation(run=run))
    rows = lines(split="train[8:]")
    # A letter, the end of the turn and a line feed.
    assert [row["tokens"] for row in rows] == [3] * 8
    assert sum(row["loss"] for row in rows) / 8 == pytest.approx(metrics["test/loss"], rel=1e-5)
    chat = json.dumps([{"role": "system", "content": "x"}, {"role": "user", "content": "a"}])
    one, other = lines(prompt=("a", chat), json=True, max_tokens=2)
    assert (one["prompt"], other["prompt"]) == ("a", chat)
    export_run(Export(run=run, what="program", output=str(tmp_path / "program")))
    assert (tmp_path / "program").stat().st_size > 0
    text = tmp_path / "text.txt"
    text.write_text("a")
    with pytest.raises(UsageError, match="a file of texts does not tell which are answers; write --split"):
        lines(inputs=(str(text),))
    with pytest.raises(UsageError, match="wanted a list of messages"):
        lines(prompt=("[{]",))


def test_a_run_that_begins_with_weights_compares_the_probabilities_of_an_answer_with_float32(
    run, flags, tmp_path, capsys
):
    weights = str(tmp_path / "weights.safetensors")
    export_run(Export(run=run, output=weights))
    capsys.readouterr()
    train(load_config([*flags, "--model.pretrained", weights, "--output_dir", str(tmp_path / "tuned")]))
    # A letter, the end of the turn and a line feed.
    assert "of 3 tokens of a test text, " in capsys.readouterr().out
