"""A run on pairs of texts: it learns to match them, and its commands read it."""

import json

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mpjax.commands import evaluate_run, export_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Export, Prediction, check, load_config
from mpjax.errors import UsageError
from mpjax.models.encoder import Encoder, load_encoder, settings_of
from mpjax.models.pretrained import export_safetensors


pytestmark = pytest.mark.extra

CONFIG = {
    "model_type": "bert",
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 8,
}


@pytest.fixture
def folder(tmp_path):
    """A folder of a small encoder with random weights."""
    folder = tmp_path / "encoder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = Encoder(settings_of(CONFIG), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


@pytest.fixture
def flags(folder, tmp_path, monkeypatch):
    """The arguments of a run that learns which letter stands for which."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"query": letter, "positive": letter.upper() * 3} for letter in "abcdefgh" * 2]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "--data.train_split train[:8] --data.test_split train[8:] --data.length 8 --data.batch_size 8"
    others = "--optimizer.name adamw --optimizer.learning_rate 0.01 --optimizer.warmup 1 --report.no_plot"
    model = f"--model.name hf:{folder} --data.tokenizer bytes --report.no_tensorboard --output_dir {tmp_path / 'run'}"
    return ["--task", "embedding", "--data.name", f"hf:{tmp_path / 'rows.jsonl'}", *f"{data} {others} {model}".split()]


def test_every_command_reads_a_run_of_embeddings(flags, folder, tmp_path, capsys):
    more = "--steps 30 --training.accumulate 2 --precision.policy mixed_float16 --training.ema 0.5"
    train(load_config([*flags, *more.split()]))
    run = str(tmp_path / "run")
    metrics = evaluate_run(Evaluation(run=run))
    assert metrics["test/accuracy"] > 0.8  # at random 0.125
    assert metrics["test/mrr"] >= metrics["test/accuracy"]
    capsys.readouterr()
    texts = tmp_path / "texts.txt"
    texts.write_text("a\nAAA\n")
    predict_run(Prediction(run=run, inputs=(str(texts),)))
    vectors = [np.array(json.loads(line)["embedding"]) for line in capsys.readouterr().out.splitlines()]
    predict_run(Prediction(run=run, split="train[:1]"))
    (pair,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert pair["cosine"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-3)
    assert [np.linalg.norm(vector) for vector in vectors] == pytest.approx([1, 1], abs=1e-3)
    export_run(Export(run=run, output=str(tmp_path / "out"), layout="huggingface"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    load_encoder(tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--data.batch_size 1", "compares a text with those of other examples; wanted at least 2"),
        ("--training.temperature 0", "--training.temperature is 0.0: wanted a positive number"),
        ("--training.chunked_loss 8", "chunked_loss 8 is not for --task embedding"),
        ("--training.label_smoothing 0.2", "the loss of embedding has none"),
        ("--training.accumulate 2 --precision.policy mixed_float8", "and products in float8, whose scales"),
        ("--model.dropout 0.1", "has no such setting; leave it out"),
    ],
)
def test_what_embeddings_cannot_use_is_an_error(flags, more, says):
    with pytest.raises(UsageError, match=says):
        train(load_config([*flags, *more.split()]))


def test_settings_of_embeddings_are_for_no_other_task():
    with pytest.raises(UsageError, match=r"--training.temperature 0.1: is for --task embedding; leave it out"):
        check(load_config(["--training.temperature", "0.1"]))
    with pytest.raises(UsageError, match=r"--training.symmetric: is for --task embedding; leave it out"):
        check(load_config(["--training.symmetric"]))
