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
from mpjax.models.encoder import load_encoder, make_encoder, settings_of
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


MODERNBERT = {
    **{key: CONFIG[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")},
    "model_type": "modernbert",
    "num_hidden_layers": 2,
    "max_position_embeddings": 8,
    "local_attention": 4,
    "mlp_dropout": 0.1,
}


@pytest.fixture
def folder(tmp_path, request):
    """A folder of a small encoder with random weights, by default of `CONFIG`."""
    folder, config = tmp_path / "encoder", getattr(request, "param", CONFIG)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = make_encoder(settings_of(config), rngs=nnx.Rngs(0))
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


@pytest.mark.parametrize("folder", [MODERNBERT], indirect=True, ids=["modernbert"])
def test_modernbert_trains_adapters_in_a_loop_with_recomputed_activations(flags, folder, tmp_path, capsys):
    more = "--steps 30 --model.scan_blocks --training.remat full --training.lora blocks/*/attention blocks/*/mlp"
    train(load_config([*flags, *f"{more} --precision.policy mixed_bfloat16 --precision.strict".split()]))
    run = str(tmp_path / "run")
    assert evaluate_run(Evaluation(run=run))["test/accuracy"] > 0.5  # at random 0.125
    texts = tmp_path / "texts.txt"
    texts.write_text("a\nAAA\n")
    capsys.readouterr()
    predict_run(Prediction(run=run, inputs=(str(texts),)))
    vectors = [np.array(json.loads(line)["embedding"]) for line in capsys.readouterr().out.splitlines()]
    with pytest.raises(UsageError, match="is a part of layers.0.attn.Wqkv.weight in the files of transformers"):
        export_run(Export(run=run, output=str(tmp_path / "adapter"), what="adapter"))
    export_run(Export(run=run, output=str(tmp_path / "out"), layout="huggingface"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if "norm" in name or "embeddings" in name}
    trained = load_encoder(tmp_path / "out", policy="mixed_bfloat16")
    trained.eval()
    tokens = np.array([[2, 100, 1, 0, 0, 0, 0, 0], [2, 68, 68, 68, 1, 0, 0, 0]], np.int32)  # of bytes, framed
    np.testing.assert_allclose(vectors, trained(tokens, np.array([3, 5], np.int32)), atol=2e-2)


@pytest.mark.parametrize("folder", [MODERNBERT], indirect=True, ids=["modernbert"])
def test_modernbert_classifies_and_its_export_names_the_classes(flags, folder, tmp_path):
    flags = [*flags[2:], "--task", "text_classification", "--data.name", f"hf:{tmp_path / 'labels.jsonl'}"]
    rows = [
        {"text": letter * number, "label": ["even", "odd"][number % 2]} for letter in "ab" for number in range(1, 9)
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = train(load_config([*flags, *["--steps", "4", "--model.pretrained_skip", "head/*", "pooler/*"]]))
    assert np.isfinite(summary["test/loss"])
    export_run(Export(run=str(tmp_path / "run"), output=str(tmp_path / "program"), what="program"))  # compares logits
    export_run(Export(run=str(tmp_path / "run"), output=str(tmp_path / "out"), layout="huggingface"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["ModernBertForSequenceClassification"]
    assert config["id2label"] == {"0": "even", "1": "odd"}
    assert config["label2id"] == {"even": 0, "odd": 1}
    keys = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {name for name in keys if not name.startswith("model.")} == {
        "head.dense.weight",
        "head.norm.weight",
        "classifier.weight",
        "classifier.bias",
    }


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
