"""Predictions of a stored run: the split as evaluated, files in order, bad files named."""

import json
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import evaluate_run, mask_values, predict_run
from mpjax.config import Evaluation, Prediction
from mpjax.data import Mask
from mpjax.data.images import decode
from mpjax.errors import DataWarning, UsageError


@pytest.fixture(scope="module")
def trained(folder_of):
    return folder_of("--steps 60 --training.ema 0.9 --loop.eval_every 60 --data.eval_batch_size 100")


def predicted(capsys, **settings):
    capsys.readouterr()
    count = predict_run(Prediction(**settings))
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(out) == count
    return out


@pytest.fixture(scope="module")
def images(trained, tmp_path_factory):
    """The first examples of the test split, as files."""
    from mpjax.commands import open_task
    from mpjax.config import from_toml

    _, source, _ = open_task(from_toml(trained / "config.toml"))
    folder = tmp_path_factory.mktemp("images")
    for index in range(7):
        Image.fromarray(decode(source.test[index]["image"], 1)[..., 0]).save(folder / f"{index}.png")
    return folder


@pytest.mark.parametrize(
    ("ema", "name"), [pytest.param(False, "test/accuracy", marks=pytest.mark.slow), (True, "ema/accuracy")]
)
def test_a_split_is_predicted_with_exactly_the_accuracy_of_its_evaluation(trained, capsys, ema, name):
    records = predicted(capsys, run=str(trained), split="test", ema=ema)
    right = np.mean([record["class"] == record["label"] for record in records])
    capsys.readouterr()
    assert right == pytest.approx(evaluate_run(Evaluation(run=str(trained), ema=ema))[name], abs=1e-12)
    assert len(records) == 360
    assert records[7]["input"] == "test[7]"


@pytest.mark.slow
def test_files_are_predicted_as_the_examples_that_they_hold(trained, images, capsys):
    split = predicted(capsys, run=str(trained), split="test[:7]", top=3)
    for inputs in ((str(images),), (f"{images}/*.png",), tuple(f"{images}/{i}.png" for i in range(7))):
        files = predicted(capsys, run=str(trained), inputs=inputs, top=3, batch_size=2)
        assert [record["input"] for record in files] == [f"{images}/{i}.png" for i in range(7)]
        assert [record["top"] for record in files] == [
            [[name, pytest.approx(p, abs=1e-6)] for name, p in record["top"]] for record in split
        ]
    first = files[0]
    assert set(first) == {"input", "class", "probability", "top"}
    assert (first["class"], first["probability"], len(first["top"])) == (*first["top"][0], 3)


def test_the_lines_can_go_to_stdout_by_its_name_without_replacing_the_file_behind_it(trained, images, capfd):
    capfd.readouterr()
    print("before")
    predict_run(Prediction(run=str(trained), inputs=(f"{images}/0.png",), output="/dev/stdout"))
    print("after")
    before, line, after = capfd.readouterr().out.splitlines()
    assert (before, json.loads(line)["input"], after) == ("before", f"{images}/0.png", "after")


def test_one_bad_file_is_an_error_or_is_reported(trained, images, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "good.png").write_bytes((images / "0.png").read_bytes())
    with pytest.raises(UsageError, match=f"^{tmp_path}/bad.png: cannot be decoded"):
        predict_run(Prediction(run=str(trained), inputs=(str(tmp_path),)))
    capsys.readouterr()
    assert predict_run(Prediction(run=str(trained), inputs=(str(tmp_path),), skip_bad=True)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"skipped: {tmp_path}/bad.png: cannot be decoded")
    assert json.loads(captured.out)["input"] == f"{tmp_path}/good.png"
    with pytest.raises(UsageError, match="none of 1 inputs could be read"):
        predict_run(Prediction(run=str(trained), inputs=(f"{tmp_path}/bad.png",), skip_bad=True))


def test_the_lines_go_to_a_file_that_is_whole_or_not_there(trained, images, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    predict_run(Prediction(run=str(trained), inputs=(str(images),), output=str(output)))
    assert capsys.readouterr().out == ""
    assert len(output.read_text().splitlines()) == 7
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"")
    with pytest.raises(UsageError, match="x.png"):
        predict_run(Prediction(run=str(trained), inputs=(str(tmp_path / "bad"),), output=str(tmp_path / "o")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "out.jsonl"]


@pytest.mark.slow
def test_another_policy_computes_nearly_the_same(trained, capsys):
    own, other = (predicted(capsys, run=str(trained), split="test[:5]", policy=policy) for policy in ("", "bfloat16"))
    for one, two in zip(own, other, strict=True):
        assert one["probability"] == pytest.approx(two["probability"], abs=0.05)
        assert one["probability"] != two["probability"]


def test_an_output_that_is_not_finite_is_an_error(trained, monkeypatch):
    from mpjax.commands import predict

    def broken(*arguments, **settings):
        step = make(*arguments, **settings)
        return lambda *given: {**step(*given), "finite": np.zeros(100, bool)}

    make = predict.make_predict_step
    monkeypatch.setattr(predict, "make_predict_step", broken)
    with pytest.raises(UsageError, match=r"test\[:5\]\[0\]: the model's output is not finite under .*--policy float32"):
        predict_run(Prediction(run=str(trained), split="test[:5]"))


def test_two_masks_of_one_name_are_refused(tmp_path):
    from mpjax.commands import folder_of_masks
    from mpjax.data import Inputs

    given = Inputs(["a/x.png", "b/x.jpg"], list, dict)
    with pytest.raises(UsageError, match=r"a/x.png and b/x.jpg: both masks would be x.png"):
        folder_of_masks(Prediction(run="r", output=str(tmp_path)), given)
    with pytest.raises(UsageError, match="--output is empty: wanted a folder for the masks"):
        folder_of_masks(Prediction(run="r"), given)


@pytest.mark.slow
def test_masks_are_written_as_class_numbers(folder_of, tmp_path, capsys):
    folder = folder_of(
        "--task segmentation --data.name digits_canvas --model.name unet --model.width 4 --model.depth 1 --steps 2 "
        "--data.batch_size 16 --precision.policy float32"
    )
    records = predicted(capsys, run=str(folder), split="test[:3]", output=str(tmp_path / "masks"))
    assert [record["mask"] for record in records] == [f"{tmp_path}/masks/test[:3][{i}].png" for i in range(3)]
    mask = np.asarray(Image.open(records[0]["mask"]))
    assert (mask.dtype, mask.shape, mask.max() <= 10) == (np.uint8, (32, 32), True)


SIZES = [(16, 16), (24, 16), (16, 40), (19, 23), (64, 32), (16, 16)]
"""Widths and heights of the images below."""


@pytest.mark.slow
def test_a_mask_has_the_values_that_were_read_and_the_size_of_its_image(folder_of, tmp_path, capsys):
    for number, (width, height) in enumerate(SIZES):
        rows = np.arange(height)[:, None] * np.ones((1, width), int)
        for kind, pixels in (("images", rows), ("masks", rows % 2 * 255)):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "data" / kind / f"{number}.png")
    folder = folder_of(
        f"--task segmentation --data.name folder:{tmp_path}/data --data.train_split train --data.test_split train "
        "--data.mask_values 0 255 --data.image_size 16 --data.batch_size 4 --model.name unet "
        "--model.width 4 --model.depth 1 --steps 2 --precision.policy float32"
    )
    inputs = (f"{tmp_path}/data/images",)
    records = predicted(capsys, run=str(folder), inputs=inputs, output=str(tmp_path / "a"), batch_size=4)
    assert len(records) == len(SIZES)
    masks = [mask_of(record) for record in records]
    assert [mask.shape[::-1] for mask in masks] == SIZES
    assert {int(value) for mask in masks for value in np.unique(mask)} <= {0, 255}
    split = predicted(capsys, run=str(folder), split="train", output=str(tmp_path / "b"), batch_size=4)
    assert sorted(mask_of(record).shape[::-1] for record in split) == sorted(SIZES)


def mask_of(record):
    with Image.open(record["mask"]) as mask:
        return np.asarray(mask)


def test_values_that_no_png_can_hold_are_told_of():
    def source(values):
        return SimpleNamespace(fields={"mask": Mask((4, 4), 2, values=values)})

    assert mask_values(source((0, 255))).tolist() == [0, 255]
    assert mask_values(source((0, 255))).dtype == np.uint8
    assert mask_values(source((1000, 7))).dtype == np.uint16
    assert mask_values(source(())).tolist() == [0, 1]
    for values in ((-1, 0), (0, 2**16)):
        with pytest.warns(DataWarning, match="which no PNG can hold: class numbers are written instead"):
            assert mask_values(source(values)).tolist() == [0, 1]


@pytest.mark.slow
def test_the_losses_of_a_language_model_are_those_of_its_evaluation(folder_of, tmp_path, capsys):
    folder = folder_of(
        "--task language_modeling --data.name docstrings --data.length 32 --model.name gpt2 --model.depth 1 "
        "--model.heads 2 --steps 2 --data.batch_size 16"
    )
    records = predicted(capsys, run=str(folder), split="test[:20]")
    capsys.readouterr()
    whole = evaluate_run(Evaluation(run=str(folder), split="test[:20]"))
    assert np.mean([record["loss"] for record in records]) == pytest.approx(whole["test/loss"], rel=1e-5)
    (tmp_path / "a.txt").write_text("Return the sum.\n" + "Open a file, " * 9 + "\n")
    short, long = predicted(capsys, run=str(folder), inputs=(str(tmp_path / "a.txt"),))
    assert (short["tokens"], long["tokens"]) == (16, 13 * 9 + 1)
    assert long["perplexity"] == pytest.approx(np.exp(long["loss"]))


@pytest.mark.slow
def test_a_device_is_written_and_not_replaced(trained, images, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        predict_run(Prediction(run=str(trained), inputs=(str(images),), output=str(tmp_path / "pipe")))
        assert len(reader.communicate(timeout=60)[0].splitlines()) == 7
    assert (tmp_path / "pipe").is_fifo()
