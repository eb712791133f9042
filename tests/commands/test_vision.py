"""A run on images with a network of Hugging Face files: it learns, and its commands read it."""

import json

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mpjax.commands import evaluate_run, export_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Export, load_config
from mpjax.errors import UsageError
from mpjax.models.pretrained import export_safetensors
from mpjax.models.vision import load_vision, make_network, settings_of


CONFIGS = {
    "dinov2": {
        "architectures": ["Dinov2WithRegistersModel"],
        "model_type": "dinov2_with_registers",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 1,
        "image_size": 8,
        "patch_size": 4,
        "num_register_tokens": 2,
        "use_swiglu_ffn": True,
        "drop_path_rate": 0.05,
    },
    "convnextv2": {
        "architectures": ["ConvNextV2ForImageClassification"],
        "model_type": "convnextv2",
        "num_channels": 1,
        "num_stages": 2,
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "patch_size": 2,
    },
}
STATISTICS = {
    "do_normalize": True,
    "image_mean": [0.3],
    "image_std": [0.5],
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_resize": True,
    "size": {"height": 8, "width": 8},
    "image_processor_type": "BitImageProcessor",
}


@pytest.fixture
def folder(tmp_path, request):
    """A folder of a small network for ten classes with random weights, by default a DINOv2."""
    folder, config = tmp_path / "network", CONFIGS[getattr(request, "param", "dinov2")]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(STATISTICS))
    model = make_network(settings_of(config), image_shape=(8, 8, 1), num_classes=10, rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


@pytest.fixture
def flags(folder, tmp_path):
    data = "--data.name digits --data.batch_size 64 --data.mean 0.3 --data.std 0.5"
    others = "--optimizer.name adamw --optimizer.learning_rate 1e-2 --optimizer.warmup 5 --report.no_plot"
    return f"{data} {others} --model.name hf:{folder} --report.no_tensorboard --output_dir {tmp_path / 'run'}".split()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["dinov2", "convnextv2"], indirect=True)
def test_every_command_reads_a_run_that_learned(flags, folder, tmp_path):
    more = "--steps 80 --precision.policy mixed_float16 --training.ema 0.5"
    train(load_config([*flags, *more.split()]))
    run = str(tmp_path / "run")
    assert evaluate_run(Evaluation(run=run))["test/accuracy"] > 0.5  # at random 0.1
    export_run(Export(run=run, output=str(tmp_path / "out"), layout="huggingface"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForImageClassification")
    assert config["problem_type"] == "single_label_classification"
    assert config["id2label"] == {str(number): str(number) for number in range(10)}
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text()) == STATISTICS
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert not np.array_equal(before["classifier.weight"], after["classifier.weight"])
    load_vision(tmp_path / "out", image_shape=(8, 8, 1), num_classes=10)


def test_other_statistics_than_those_of_the_weights_are_refused(flags, folder):
    says = r"says, --data.mean 0.3 --data.std 0.5, and this run has --data.mean 0.2 --data.std 0.5: write the former"
    flags[flags.index("0.3")] = "0.2"
    with pytest.raises(UsageError, match=says) as error:
        train(load_config([*flags, "--steps", "1"]))
    assert error.value.repair == {"data.mean": (0.3,), "data.std": (0.5,)}


def test_a_head_for_other_classes_is_made_anew_if_asked_for(flags, folder):
    other = make_network(settings_of(CONFIGS["dinov2"]), image_shape=(8, 8, 1), num_classes=3, rngs=nnx.Rngs(0))
    export_safetensors(other, folder / "model.safetensors", layout="huggingface")
    with pytest.raises(UsageError, match=r"--model.pretrained_skip 'head/\*'"):
        train(load_config([*flags, "--steps", "1"]))
    train(load_config([*flags, "--steps", "1", "--model.pretrained_skip", "head/*"]))


@pytest.mark.slow
def test_an_export_counts_the_classes_of_its_head_and_tells_of_another_image_size(flags, folder, tmp_path, capsys):
    (folder / "config.json").write_text(json.dumps(CONFIGS["dinov2"] | {"num_labels": 7}))
    train(load_config([*flags, "--steps", "1", "--model.pretrained", "none", "--data.image_size", "12"]))
    export_run(Export(run=str(tmp_path / "run"), output=str(tmp_path / "out"), layout="huggingface"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_labels"] == 10
    says = 'whose size {"height": 8, "width": 8} makes images of another size than the run\'s 12 x 12: write that size'
    assert says in capsys.readouterr().out
