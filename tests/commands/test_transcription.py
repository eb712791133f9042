"""Runs that write the texts of sounds, and that tell sounds apart: every command reads them."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import soundfile
from flax import nnx
from safetensors.numpy import load_file

from mpjax.commands import evaluate_run, export_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Export, Prediction, check, load_config
from mpjax.errors import UsageError
from mpjax.models.pretrained import export_safetensors
from mpjax.models.whisper import Whisper, load_whisper, read_settings


TINY = pathlib.Path(__file__).parents[1] / "models" / "whisper" / "tiny"
OF_TEXTS = ["--task", "transcription", "--data.length", "6"]
TONES = {"low": 200, "mid": 700, "top": 3000}


@pytest.fixture
def folder(tmp_path):
    """A folder of a small Whisper with random weights."""
    folder = tmp_path / "whisper"
    shutil.copytree(TINY, folder)
    model = Whisper(read_settings(folder), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


@pytest.fixture
def flags(folder, tmp_path):
    """The arguments of a run on tones of three heights, which are words or classes."""
    rows = ["file_name,text"]
    for number in range(9):
        word, tone = [*TONES.items()][number % 3]
        path = tmp_path / "set" / word / f"{number}.{'wav' if number % 2 else 'flac'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, 0.5 * np.sin(2 * np.pi * tone * np.arange(12_000) / 16_000 + number), 16_000)
        rows.append(f"{word}/{path.name},{word}")
    (tmp_path / "set" / "metadata.csv").write_text("\n".join(rows))
    data = f"--data.name folder:{tmp_path / 'set'} --data.tokenizer bytes --data.test_split train"
    others = "--data.batch_size 8 --data.eval_batch_size 8 --optimizer.name adamw --optimizer.learning_rate 0.005"
    more = "--optimizer.warmup 2 --optimizer.weight_decay 0 --loop.eval_every 0 --report.no_plot"
    ends = f"--report.no_tensorboard --model.name hf:{folder} --output_dir {tmp_path / 'run'}"
    return f"{data} {others} {more} {ends}".split()


def lines(capsys, **settings):
    capsys.readouterr()
    predict_run(Prediction(**settings))
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


@pytest.mark.slow
def test_a_short_run_is_evaluated_and_writes_texts(flags, tmp_path, capsys):
    task = [*OF_TEXTS, "--precision.policy", "float32", "--steps", "2"]
    summary = train(load_config([*flags, *task]))
    run = str(tmp_path / "run")
    rows, _ = lines(capsys, run=run, split="train")
    assert sum(row["loss"] for row in rows) / 9 == pytest.approx(summary["test/loss"], rel=1e-5)
    rows, told = lines(capsys, run=run, split="train", generate=True, max_tokens=3)
    assert [row["reference"] for row in rows] == [pathlib.Path(row["input"]).parent.name for row in rows]
    assert {(row["words"], row["word_errors"]) for row in rows} == {(1, 1)}
    assert "word error rate 100.00%: 9 errors in 9 words" in told
    again, _ = lines(capsys, run=run, inputs=(rows[0]["input"],), generate=True, max_tokens=3)
    assert again == [{key: rows[0][key] for key in ("input", "text", "tokens", "stopped")}]


@pytest.mark.slow
def test_every_command_reads_a_run_of_texts(flags, folder, tmp_path, capsys):
    task = [*OF_TEXTS, "--precision.policy", "mixed_float16", "--training.label_smoothing", "0"]
    summary = train(load_config([*flags, *task, "--steps", "100"]))
    assert summary["skipped"] == 0
    run = str(tmp_path / "run")
    metrics = evaluate_run(Evaluation(run=run))
    assert metrics["test/loss"] == pytest.approx(summary["test/loss"], rel=1e-5)
    assert metrics["test/accuracy"] > 0.9  # of three letters and the end; at random 1/260

    rows, _ = lines(capsys, run=run, split="train")
    assert [row["tokens"] for row in rows] == [4] * 9
    assert sum(row["loss"] for row in rows) / 9 == pytest.approx(metrics["test/loss"], rel=1e-5)
    rows, told = lines(capsys, run=run, split="train", generate=True, batch_size=4)
    right = [row for row in rows if row["text"] == pathlib.Path(row["input"]).parent.name]
    assert sum(row["word_errors"] for row in rows) == 9 - len(right) <= 1
    assert f"{9 - len(right)} errors in 9 words" in told
    files = tuple(row["input"] for row in rows[:2])
    again, _ = lines(capsys, run=run, inputs=files)
    assert [row["text"] for row in again] == [row["text"] for row in rows[:2]]
    rows, told = lines(capsys, run=run, inputs=(*files, f"{tmp_path}/set/metadata.csv"), skip_bad=True)
    assert len(rows) == 2
    assert "skipped: " in told
    with pytest.raises(UsageError, match="--prompt: .* writes the texts of sounds"):
        predict_run(Prediction(run=run, prompt=("a",)))

    export_run(Export(run=run, what="program", output=str(tmp_path / "program")))
    out = tmp_path / "out"
    export_run(Export(run=run, output=str(out), layout="huggingface"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys()
    assert np.array_equal(before["model.encoder.embed_positions.weight"], after["model.encoder.embed_positions.weight"])
    load_whisper(out)
    resumed = train(load_config([*flags, *task, "--steps", "102", "--resume"]))
    assert (resumed["attempts"], resumed["skipped"]) == (102, 0)


@pytest.mark.slow
def test_every_command_reads_a_run_of_classes(flags, folder, tmp_path, capsys):
    task = ["--task", "audio_classification", "--model.pretrained_skip", "head/*", "projector/*"]
    summary = train(load_config([*flags, *task, "--steps", "40", "--precision.policy", "mixed_bfloat16"]))
    assert summary["test/accuracy"] > 0.9  # at random 1/3
    run = str(tmp_path / "run")
    sounds = [str(path) for path in sorted((tmp_path / "set").glob("*/*.*"))]
    rows, _ = lines(capsys, run=run, inputs=tuple(sounds), top=1)
    assert sum(row["class"] == pathlib.Path(row["input"]).parent.name for row in rows) >= 8
    export_run(Export(run=run, what="program", output=str(tmp_path / "program")))
    export_run(Export(run=run, output=str(tmp_path / "out"), layout="huggingface"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["WhisperForAudioClassification"]
    assert config["id2label"] == {"0": "low", "1": "mid", "2": "top"}
    assert {"projector.weight", "classifier.bias", "encoder.conv1.weight"} <= load_file(
        tmp_path / "out" / "model.safetensors"
    ).keys()
    changed = json.loads((folder / "preprocessor_config.json").read_text())
    changed |= {"n_fft": 512}  # features of the same shape
    (folder / "preprocessor_config.json").write_text(json.dumps(changed))
    for command in (
        lambda: predict_run(Prediction(run=run, inputs=tuple(sounds))),
        lambda: evaluate_run(Evaluation(run=run)),
    ):
        with pytest.raises(UsageError, match="makes other features of sounds .*: window 512, before 400; put the file"):
            command()


def test_a_language_or_features_without_a_meaning_are_errors(flags):
    with pytest.raises(UsageError, match="--data.features whisper is for transcription and audio_classification"):
        check(load_config(["--data.features", "whisper"]))
    with pytest.raises(UsageError, match="--data.language en is for --task transcription"):
        check(load_config(["--data.language", "en"]))
    with pytest.raises(UsageError, match="hears 100 frames of 80 mel bins, and the data has 3000 of 80"):
        train(load_config([*flags, *OF_TEXTS, "--data.features", "whisper"]))
