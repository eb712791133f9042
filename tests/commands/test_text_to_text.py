"""A run that writes texts from others: its commands read it, and an overflow is found, named and repaired."""

import json
import pathlib
import shutil

import jax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mpjax.commands import evaluate_run, export_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Export, Prediction, load_config
from mpjax.errors import Diverged, UsageError
from mpjax.models.pretrained import export_safetensors
from mpjax.models.t5 import T5, load_t5, read_settings


pytestmark = pytest.mark.extra

TINY = pathlib.Path(__file__).parents[1] / "models" / "t5" / "tiny"
OVERFLOWING = 1e5
"""The factor of the weights behind the ReLU of a layer: T5 v1.0 learned in bfloat16, which has such numbers."""


@pytest.fixture
def folder(tmp_path, request):
    """A folder of a small T5 with random weights, one layer of which may overflow in float16."""
    folder, factor = tmp_path / "t5", getattr(request, "param", 1.0)
    shutil.copytree(TINY, folder)
    if factor != 1:  # as published; with dropout, this network learns too slowly for the other test
        config = (folder / "config.json").read_text().replace('"dropout_rate": 0.0', '"dropout_rate": 0.1')
        (folder / "config.json").write_text(config)
    model = T5(read_settings(folder), rngs=nnx.Rngs(0))
    model.encoder.blocks[1].mlp.down.kernel[...] *= factor
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


@pytest.fixture
def flags(folder, tmp_path, monkeypatch):
    """The arguments of a run that learns to write a letter of the source as a capital."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"text": letter * 2, "target": letter.upper() * 3} for letter in "abcdefgh" * 2]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "--data.columns source text --data.train_split train[:8] --data.test_split train[8:] --data.length 8"
    others = "--data.batch_size 8 --optimizer.name adamw --optimizer.learning_rate 0.01 --optimizer.warmup 1"
    model = f"--model.name hf:{folder} --report.no_plot --report.no_tensorboard --output_dir {tmp_path / 'run'}"
    name = f"hf:{tmp_path / 'rows.jsonl'}"
    words = f"--data.tokenizer bytes {data} {others} {model}"
    return ["--task", "text_to_text", "--data.name", name, *words.split()]


def test_every_command_reads_a_run_of_targets(flags, folder, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    more = "--steps 60 --precision.policy mixed_float16 --loop.save_every 30 --optimizer.weight_decay 0"
    summary = train(load_config([*flags, *more.split()]))
    assert summary["skipped"] == 0
    run = str(tmp_path / "run")
    metrics = evaluate_run(Evaluation(run=run))
    assert metrics["test/accuracy"] > 0.9  # at random 1/260
    assert metrics["test/loss"] == pytest.approx(summary["test/loss"], rel=1e-5)

    def lines(**settings):
        capsys.readouterr()
        predict_run(Prediction(run=run, **settings))
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    rows = lines(split="train[8:]")
    assert [row["tokens"] for row in rows] == [4] * 8  # three letters and the end
    assert sum(row["loss"] for row in rows) / 8 == pytest.approx(metrics["test/loss"], rel=1e-5)
    written = lines(prompt=("aa", "hh"), json=True, max_tokens=6)
    assert [(row["text"], row["tokens"], row["stopped"]) for row in written] == [("AAA", 4, "end"), ("HHH", 4, "end")]
    texts = tmp_path / "texts.txt"
    texts.write_text("bb\n")
    assert lines(inputs=(str(texts),), generate=True)[0]["text"] == "BBB"
    with pytest.raises(UsageError, match="a file of texts has no targets to compare with: write --split"):
        lines(inputs=(str(texts),))
    with pytest.raises(UsageError, match="--chat: .* writes targets from sources"):
        lines(prompt=("aa",), chat=True)
    export_run(Export(run=run, what="program", output=str(tmp_path / "program")))
    export_run(Export(run=run, output=str(tmp_path / "out"), layout="huggingface"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    load_t5(tmp_path / "out")
    files = Prediction(run=f"hf:{tmp_path / 'out'}", prompt=("cc",), max_tokens=2)
    with pytest.raises(UsageError, match="out has no files of a tokenizer; write --data.tokenizer FOLDER"):
        predict_run(files)  # those of bytes are none
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "cc": 5}, unk_token="<pad>"))
    tokenizer.save(str(tmp_path / "out" / "tokenizer.json"))
    named = {"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(named))
    assert predict_run(files) == 1
    capsys.readouterr()
    again = train(load_config([*flags, *more.replace("60", "62").split(), "--resume"]))
    assert (again["attempts"], again["skipped"]) == (62, 0)


@pytest.mark.parametrize("folder", [OVERFLOWING], indirect=True, ids=["overflowing"])
@jax.numpy_dtype_promotion("standard")  # as users have it: behind a float32 layer, the residual stream is float32 too
def test_an_overflow_in_a_feed_forward_is_found_named_and_repaired(flags, tmp_path):
    more = "--precision.policy mixed_float16 --data.batch_size 4 --loop.eval_every 0"
    start = [*flags, *more.split()]
    with pytest.raises(Diverged, match="first bad layer: encoder/blocks/1/mlp/down"):
        train(load_config([*start, "--steps", "20"]))
    (file,) = (tmp_path / "run").glob("diagnosis_*.json")
    found = json.loads(file.read_text())
    assert [found[name] for name in ("verdict", "path", "direction", "operation", "verified")] == [
        "overflow",
        "encoder/blocks/1/mlp/down",
        "forward",
        "dot_general",
        True,
    ]
    assert found["rules"] == {"encoder/blocks/1/mlp/down": "float32"}
    rules = f"--precision.rules encoder/blocks/1/mlp/down float32 --steps 2 --output_dir {tmp_path / 'repaired'}"
    summary = train(load_config([*start, *rules.split()]))
    assert (summary["skipped"], summary["attempts"]) == (0, 2)
