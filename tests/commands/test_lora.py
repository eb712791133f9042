"""A run with adapters: its checkpoints hold what was trained, and commands read the frozen weights from their file."""

import math
import pathlib
import re
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mpjax.commands import diagnose_run, evaluate_run, export_run, run
from mpjax.config import Diagnose, Evaluation, Export, load_config
from mpjax.errors import UsageError
from mpjax.loop import read_checkpoint
from mpjax.models import MLP
from mpjax.models.decoder import Decoder, load_decoder, read_settings
from mpjax.models.pretrained import export_safetensors


TINY = pathlib.Path(__file__).parents[1] / "models" / "decoder" / "tiny"

SHARED = (
    "--model.name mlp --model.width 16 --data.name digits --optimizer.name adamw --optimizer.learning_rate 1e-2 "
    "--optimizer.warmup 2 --loop.save_every 4 --loop.eval_every 8 --report.no_plot --report.no_tensorboard "
    "--precision.policy mixed_bfloat16 --training.lora layers/* --training.lora_rank 2 --training.lora_trained head"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Weights of an MLP."""
    file = tmp_path_factory.mktemp("base") / "mlp.safetensors"
    export_safetensors(MLP(64, 16, 2, 10, rngs=nnx.Rngs(7)), file)
    return file


def train(folder, base, flags):
    return run(load_config(f"--output_dir {folder} {SHARED} --model.pretrained {base} {flags}".split()))


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Eight steps in one go, with averages."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    train(folder, base, "--steps 8 --training.ema 0.9")
    return folder


def test_a_checkpoint_holds_adapters_and_what_is_trained_beside_them(trained):
    _, saved, about = read_checkpoint(trained / "checkpoints")
    trained_ones = ["head/bias", "head/kernel"]
    trained_ones += [f"layers/{layer}/lora_{array}" for layer in (0, 1) for array in "ab"]
    for part in ("params/", "ema/", "/mu/", "/nu/"):
        assert sorted(name.partition(part)[2] for name in saved if part in name) == trained_ones
    assert sorted(about["base"]["digests"]) == sorted(
        f"{layer}/{array}" for layer in ("layers/0", "layers/1", "head") for array in ("kernel", "bias")
    )


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(trained, base, tmp_path):
    constant = "--steps 8 --training.ema 0.9 --optimizer.schedule constant --optimizer.warmup 0"
    train(tmp_path / "c", base, constant)
    train(tmp_path / "d", base, constant.replace("8", "4"))
    run(load_config(f"--resume --output_dir {tmp_path / 'd'} --steps 8".split()))
    (_, whole, _), (_, resumed, _) = (read_checkpoint(tmp_path / name / "checkpoints") for name in "cd")
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not np.array_equal(whole[name], resumed[name])] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not in the checkpoint")
def test_what_a_resumed_run_freezes_keeps_what_it_learned_and_what_it_trains_begins_as_in_the_file(base, tmp_path):
    """The head is trained for four steps, then the first bias in its place."""
    train(tmp_path / "a", base, "--steps 4")
    _, before, _ = read_checkpoint(tmp_path / "a" / "checkpoints")
    flags = f"--resume --output_dir {tmp_path / 'a'} --steps 6 --training.lora_trained layers/0/bias"
    run(load_config(flags.split()))
    _, after, _ = read_checkpoint(tmp_path / "a" / "checkpoints")
    learned, file = before["params/head/kernel"], load_file(base)
    assert not np.array_equal(learned, file["head.kernel"])
    bias = after["params/layers/0/bias"]
    assert 0 < np.max(np.abs(bias - file["layers.0.bias"])) < 0.1
    export_run(Export(run=str(tmp_path / "a"), output=str(tmp_path / "m.safetensors"), checkpoint="latest"))
    np.testing.assert_array_equal(load_file(tmp_path / "m.safetensors")["head.kernel"], learned)


@pytest.mark.slow
def test_an_evaluation_reads_the_frozen_weights_and_a_merged_export_computes_the_same(trained, tmp_path):
    metrics = evaluate_run(Evaluation(run=str(trained), policy="float32"))
    export_run(Export(run=str(trained), output=str(tmp_path / "m.safetensors"), checkpoint="latest"))
    tensors = load_file(tmp_path / "m.safetensors")
    assert sorted(tensors) == sorted(f"{m}.{a}" for m in ("head", "layers.0", "layers.1") for a in ("bias", "kernel"))
    flags = SHARED.partition(" --training.lora ")[0].replace("mixed_bfloat16", "float32")
    flags += f" --model.pretrained {tmp_path / 'm.safetensors'} --steps 1 --optimizer.learning_rate 0"
    merged = run(load_config(f"--output_dir {tmp_path / 'b'} {flags}".split()))
    assert merged["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-5)


def test_other_frozen_weights_are_refused_and_so_are_absent_ones(trained, base, tmp_path):
    """The file of the run has one other number; then it is gone."""
    moved = tmp_path / "base.safetensors"
    shutil.copy(base, moved)
    try:
        tensors = load_file(moved)
        tensors["layers.1.kernel"][0, 0] += 1
        save_file(tensors, base)
        with pytest.raises(UsageError, match="1 of 4 arrays differ, such as layers/1/kernel; put the files of before"):
            evaluate_run(Evaluation(run=str(trained)))
        with pytest.raises(UsageError, match="1 of 4 arrays differ, such as layers/1/kernel"):
            run(load_config(f"--resume --output_dir {trained} --steps 10".split()))
        base.unlink()
        with pytest.raises(UsageError, match="over frozen weights of .*mlp.safetensors, which cannot be read: no file"):
            evaluate_run(Evaluation(run=str(trained)))
    finally:
        shutil.copy(moved, base)
    evaluate_run(Evaluation(run=str(trained)))


def test_weights_that_would_stay_random_are_an_error(base, tmp_path):
    flags = f"{SHARED.replace('--training.lora_trained head', '')} --model.pretrained {base}"
    with pytest.raises(UsageError, match="head/bias is not in .* at its random initial value; write"):
        run(load_config(f"--output_dir {tmp_path / 'a'} {flags} --model.pretrained_skip head/* --steps 1".split()))


def test_without_a_file_checkpoints_hold_the_frozen_weights_too(tmp_path, capsys):
    run(load_config(f"--output_dir {tmp_path / 'a'} {SHARED} --steps 2".split()))
    assert "No file has the frozen ones, which keep their initial values" in capsys.readouterr().out
    _, saved, about = read_checkpoint(tmp_path / "a" / "checkpoints")
    assert "base" not in about
    assert {"params/layers/0/kernel", "params/layers/1/bias", "params/layers/0/lora_a"} <= saved.keys()
    assert not [name for name in saved if "mu/layers/0/kernel" in name]


def test_a_layer_that_the_model_does_not_call_is_an_error(tmp_path):
    (tmp_path / "own.py").write_text(
        "from flax import nnx\n"
        "class Net(nnx.Module):\n"
        "    def __init__(self, fields, *, rngs):\n"
        "        self.read = nnx.Linear(64, 8, rngs=rngs)\n"
        "        self.head = nnx.Linear(8, 10, rngs=rngs)\n"
        "    def __call__(self, x):\n"
        "        return self.head(x.reshape(len(x), -1) @ self.read.kernel[...].astype(x.dtype))\n"
    )
    flags = f"--model.name {tmp_path / 'own.py'}:Net --data.name digits --training.lora read --steps 1"
    with pytest.raises(UsageError, match="--training.lora covers read, which the model does not call"):
        run(load_config(f"--output_dir {tmp_path / 'a'} {flags}".split()))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--training.lora_rank 8", "--training.lora_rank 8 without --training.lora"),
        ("--training.lora_trained head", "--training.lora_trained head without --training.lora"),
        ("--training.lora head --training.freeze stem", "--training.freeze stem with --training.lora, which freezes"),
        ("--training.lora head --training.lora_alpha 0", "--training.lora_alpha is 0.0: wanted a positive number"),
    ],
)
def test_settings_without_a_meaning_are_errors(flags, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        run(load_config(f"--output_dir {tmp_path / 'a'} {flags}".split()))


def test_an_export_of_adapters_wants_adapters_alone(trained, tmp_path):
    with pytest.raises(UsageError, match="--what adapter: the run also trained head, which an adapter's file would"):
        export_run(Export(run=str(trained), output=str(tmp_path / "a"), what="adapter"))


@pytest.mark.slow
def test_half_precision_learns_what_float32_learns(base, tmp_path):
    """Sixty steps; a loss that rounding alone moves. Seeds move it by 0.06."""

    def loss(policy):
        flags = SHARED.replace("mixed_bfloat16", policy) + f" --model.pretrained {base} --steps 60"
        return run(load_config(f"--output_dir {tmp_path / policy} {flags}".split()))["test/loss"]

    wide = loss("float32")
    assert wide < 1.7
    assert loss("mixed_float16") == pytest.approx(wide, abs=0.005)
    assert loss("mixed_bfloat16") == pytest.approx(wide, abs=0.03)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A folder with random weights of a decoder of three blocks."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(TINY / "config.json", folder)
    model = Decoder(read_settings(TINY), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("mixed_bfloat16", "--training.lora_base nf4 --training.lora_variant dora"),
        ("mixed_float16", "--training.lora_base bfloat16 --precision.initial_scale 1024 --model.scan_blocks"),
        ("O1", "--training.lora_base int8 --precision.initial_scale 1024"),
        ("mixed_float8", "--training.lora_base bfloat16 --training.lora_variant rslora"),
    ],
)
def test_what_was_asked_runs_and_the_folder_of_a_decoder_serves_every_command(decoder, tmp_path, capsys, policy, flags):
    """Strictly: no product of a layer or of an adapter runs in another dtype than asked for, but for this device's."""
    shared = (
        "--task language_modeling --data.name docstrings --data.tokenizer bytes --data.length 16 --data.batch_size 8 "
        f"--data.eval_batch_size 32 --model.name hf:{decoder} --steps 8 --loop.log_every 4 --optimizer.name adamw "
        "--optimizer.learning_rate 1e-2 --optimizer.warmup 2 --precision.strict --report.no_plot "
        "--report.no_tensorboard --training.lora blocks/*/attention/* blocks/*/mlp --training.lora_rank 4"
    )
    folder = tmp_path / "run"
    summary = run(load_config(f"--output_dir {folder} {shared} --precision.policy {policy} {flags}".split()))
    assert (summary["steps"], summary["skipped"]) == (8, 0)
    assert summary["test/loss"] < math.log(260)
    assert re.search(r"of 15 tokens of a test text, \d+\.\d% have another probability", capsys.readouterr().out)
    metrics = evaluate_run(Evaluation(run=str(folder)))
    assert metrics["test/loss"] == pytest.approx(summary["test/loss"], rel=1e-5)
    export_run(Export(run=str(folder), output=str(tmp_path / "m"), layout="huggingface", dtype="float32"))
    merged = load_decoder(tmp_path / "m")
    assert not np.array_equal(
        merged.blocks[0].attention.query.kernel, load_decoder(decoder).blocks[0].attention.query.kernel
    )
    export_run(Export(run=str(folder), output=str(tmp_path / "a"), what="adapter"))
    rounded = next((base for base in ("int8", "nf4", "bfloat16") if f"lora_base {base}" in flags), "")
    assert (f"trained on weights in {rounded}: over those of the file" in capsys.readouterr().out) == bool(rounded)
    assert len(load_file(tmp_path / "a" / "adapter_model.safetensors")) == 21 * (3 if "dora" in flags else 2)
    if policy == "mixed_bfloat16":
        assert diagnose_run(Diagnose(run=str(folder), step=8)).verdict == "healthy"
