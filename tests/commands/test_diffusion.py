"""A run of diffusion learns under every policy, draws images, resumes to the bit, and refuses what it cannot mean."""

import json

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import evaluate_run, export_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Evaluation, Export, Prediction, load_config
from mpjax.data import Image as ImageField
from mpjax.data import Source
from mpjax.errors import UsageError


DIT = "--model.name dit_s2 --model.width 32 --model.depth 2 --model.heads 2 --model.patch 4"
UNET = "--model.name unet_ddpm --model.width 8 --model.depth 1"
LEARNS = "--optimizer.name adamw --optimizer.learning_rate 3e-3 --optimizer.weight_decay 0 --optimizer.warmup 2"
QUIET = "--report.no_plot --report.no_tensorboard"


def config_of(folder, words, model=DIT):
    return load_config(f"--task diffusion {model} {LEARNS} {QUIET} --output_dir {folder} {words}".split())


def drawn(run, folder, **settings):
    """The images that a run draws, uint8 [N, H, W]."""
    predict_run(Prediction(run=str(run), output=str(folder), **settings))
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.iterdir())])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "O1"])
def test_a_run_learns_as_in_float32(policy, tmp_path):
    summary = train(config_of(tmp_path / "run", f"--steps 60 --precision.policy {policy} --loop.eval_every 0"))
    # At first, a network that predicts nothing has a loss of 0.83.
    assert summary["skipped"] == 0
    assert summary["test/loss"] == pytest.approx(0.6098, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float16", "mixed_float8"])
@pytest.mark.parametrize("model", ["dit", "unet"])
def test_every_policy_trains(policy, model, tmp_path):
    which = UNET if model == "unet" else DIT.replace("width 32 --model.depth 2", "width 64 --model.depth 3")
    rules = " --precision.rules type:linear_layer float8" if (policy, model) == ("mixed_float8", "unet") else ""
    words = f"--steps 30 --precision.policy {policy}{rules} --loop.eval_every 0"
    summary = train(config_of(tmp_path / "run", words, which))
    assert summary["skipped"] == 0
    assert summary["test/loss"] < 0.75


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with a moving average, whose labels are dropped at times."""
    folder = tmp_path_factory.mktemp("diffusion") / "run"
    words = "--steps 8 --precision.policy mixed_float16 --training.ema 0.5 --loop.save_every 4 --training.accumulate 2"
    train(config_of(folder, f"{words} --training.remat full --model.scan_blocks"))
    return folder


@pytest.mark.slow
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(run):
    """360 examples, in one batch, in batches with padding, and from two devices."""
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    whole = next(line["test/loss"] for line in reversed(losses) if "test/loss" in line)
    config = (run / "config.toml").read_text()
    try:
        for size in (50, 7):
            (run / "config.toml").write_text(config.replace("eval_batch_size = 360", f"eval_batch_size = {size}"))
            found = evaluate_run(Evaluation(run=str(run), checkpoint="latest", policy="float32"))
            again = evaluate_run(Evaluation(run=str(run), checkpoint="latest"))
            assert again["test/loss"] == pytest.approx(whole, rel=1e-4)  # float16 sums in another order
            assert found["test/loss"] == pytest.approx(whole, rel=1e-3)
    finally:
        (run / "config.toml").write_text(config)


def test_images_are_drawn_by_their_number_class_and_seed(run, tmp_path, capsys):
    few = {"sampler_steps": 4, "ema": True}
    images = drawn(run, tmp_path / "a", images=5, classes=("3", "7"), **few)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["number"], line["class"]) for line in lines] == [(0, "3"), (1, "7"), (2, "3"), (3, "7"), (4, "3")]
    assert (images.shape, images.dtype) == ((5, 8, 8), np.uint8)
    assert images.std() > 20
    in_twos = drawn(run, tmp_path / "b", images=5, classes=("3", "7"), batch_size=2, **few)
    assert np.max(np.abs(images.astype(int) - in_twos)) <= 1  # the last bit of float16
    for name, other in {
        "seed": {"seed": 1},
        "eta": {"eta": 1.0},
        "guidance": {"guidance": 8.0},
        "none": {"guidance": 0.0, "classes": ()},
        "steps": {"sampler_steps": 5},
        "average": {"ema": False},
    }.items():
        changed = drawn(run, tmp_path / name, **{"images": 5, "classes": ("3", "7"), **few, **other})
        assert np.any(images != changed), name


def test_a_grid_has_all_images(run, tmp_path):
    predict_run(Prediction(run=str(run), output=str(tmp_path / "all.png"), images=5, sampler_steps=2))
    with Image.open(tmp_path / "all.png") as image:
        assert image.size == (3 * 9 - 1, 2 * 9 - 1)


def test_images_of_before_are_not_mixed_with_new_ones(run, tmp_path):
    (tmp_path / "00007.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"has images: write another folder, or remove them"):
        predict_run(Prediction(run=str(run), output=str(tmp_path), images=1))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"images": 1, "seed": 2**32, "output": "x"}, r"seed is 4294967296: wanted 0 to 2\*\*32 - 1"),
        ({"images": 1, "sampler_steps": 0, "output": "x"}, "sampler_steps is 0: wanted 1 to 1000"),
        ({"images": 1, "sampler_steps": 1001, "output": "x"}, "sampler_steps is 1001: wanted 1 to 1000"),
        ({"images": 1, "eta": 1.5, "output": "x"}, "eta is 1.5: wanted 0 to 1"),
        ({"images": 1, "classes": ("10",), "output": "x"}, "--classes 10: the run has no such class; it has 10: 0, 1"),
        ({"images": 1, "guidance": 0.0, "classes": ("1",), "output": "x"}, "--guidance 0 draws without a class"),
        ({"images": 1}, "--output is empty: wanted a folder"),
        ({"images": 1, "output": "missing/all.png"}, "there is no folder missing"),
        ({"images": 1, "top": 3, "output": "x"}, "--top has no meaning for images that are drawn"),
        ({"images": 1, "split": "test", "output": "x"}, "both --split and --images: wanted one"),
        ({"split": "test", "eta": 1.0}, "--eta: is for --images, a number of them"),
        ({"split": "test"}, "is for diffusion, which draws: write --images N --output FOLDER"),
        ({"prompt": ("a",)}, "is for diffusion: --prompt and --generate want one with"),
    ],
)
def test_what_a_sampler_cannot_mean_is_refused(run, settings, says):
    with pytest.raises(UsageError, match=says):
        predict_run(Prediction(run=str(run), **settings))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(run, tmp_path):
    words = "--steps 8 --precision.policy mixed_float16 --training.ema 0.5 --training.accumulate 2"
    words += " --training.remat full --model.scan_blocks --loop.eval_every 8 --loop.save_every 4"
    words += " --optimizer.schedule constant --optimizer.warmup 0"
    train(config_of(tmp_path / "run", words.replace("--steps 8", "--steps 4")))
    train(config_of(tmp_path / "run", f"{words} --resume"))
    train(config_of(tmp_path / "whole", words))
    ends = [
        next(json.loads(line) for line in reversed((tmp_path / name / "metrics.jsonl").read_text().splitlines()))
        for name in ("run", "whole")
    ]
    assert ends[0]["test/loss"] == ends[1]["test/loss"]


@pytest.mark.slow
def test_a_program_cannot_be_exported_but_weights_can(run, tmp_path):
    export_run(Export(run=str(run), output=str(tmp_path / "w.safetensors")))
    with pytest.raises(UsageError, match="--what program.*diffusion"):
        export_run(Export(run=str(run), what="program", output=str(tmp_path / "program")))


@pytest.mark.slow
def test_images_without_labels_train_and_draw(tmp_path):
    words = "--data.name digits_canvas --data.batch_size 16 --steps 1 --loop.eval_every 0 --data.eval_batch_size 16"
    words += " --precision.policy float32 --data.test_split test[:16]"
    train(config_of(tmp_path / "run", words, DIT.replace("patch 4", "patch 16")))
    assert drawn(tmp_path / "run", tmp_path / "a", images=2, sampler_steps=2).shape == (2, 32, 32)
    for name, value in (("guidance", 2.0), ("classes", ("1",))):
        with pytest.raises(UsageError, match=f"--{name} .*: the run in .* has no classes; leave it out"):
            drawn(tmp_path / "run", tmp_path / "b", images=2, **{name: value})


@pytest.mark.slow
def test_a_network_that_never_dropped_a_label_has_no_guidance(tmp_path):
    train(config_of(tmp_path / "run", "--steps 1 --loop.eval_every 0 --training.drop_label 0"))
    with pytest.raises(UsageError, match=r"--guidance 2.0: .* never dropped a label"):
        drawn(tmp_path / "run", tmp_path / "a", images=1, guidance=2.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model.name resnet18", "resnet18 takes no times, as --task diffusion wants: write --model.name dit_s2 or"),
        ("--data.mixup 0.2", "--data.mixup 0.2: --task diffusion would learn to draw the images that it makes"),
        ("--data.random_erasing 0.2", "--data.random_erasing 0.2: --task diffusion would learn"),
        ("--data.randaugment_ops 2", "--data.randaugment_ops 2: --task diffusion would learn"),
        ("--data.mean 0.3", r"--data.mean 0.3: --task diffusion scales images to \[-1, 1\]"),
        ("--data.std 0.3", r"--data.std 0.3: --task diffusion scales images to \[-1, 1\]"),
        ("--training.label_smoothing 0.2", "the loss of diffusion has none; leave it out"),
        (
            "--training.class_weights 1 2",
            "is for classification, segmentation, text_classification, audio_classification, not for --task diff",
        ),
        ("--data.ignore_index 1", "--data.ignore_index 1: is for classification"),
        ("--training.chunked_loss 8", "has no methods `features` and `logits`"),
        ("--task classification", "--model.name dit_s2 is for --task diffusion, not for --task classification"),
        ("--task classification --model.name mlp --training.prediction eps", "prediction eps is for --task diffusion"),
        ("--task classification --model.name mlp --training.min_snr 5", "min_snr 5.0 is for --task diffusion"),
    ],
)
def test_settings_that_a_diffusion_does_not_have_are_refused(words, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        train(config_of(tmp_path / "run", f"--steps 1 {words}"))


@pytest.mark.parametrize("values", [(-1.0, 1.0), (0.0, 255.0)])
def test_floating_images_outside_0_to_1_are_refused(values, tmp_path):
    low, high = values
    images = np.random.default_rng(0).uniform(low, high, (64, 8, 8, 1)).astype(np.float32)
    examples = [{"image": image} for image in images]
    source = Source("mine", {"image": ImageField((8, 8, 1))}, examples, examples)
    with pytest.raises(UsageError, match=r"pixels from .* wants uint8 in 0..255 or floating point in \[0, 1\]"):
        train(config_of(tmp_path / "run", "--steps 1 --data.batch_size 8"), source=source)
