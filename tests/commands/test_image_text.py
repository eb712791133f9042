"""A run on images with texts: it learns which belong together, and its commands read it."""

import csv
import dataclasses
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import evaluate_run, export_run, predict_run
from mpjax.commands import run as train
from mpjax.config import Data, Evaluation, Export, Prediction, load_config
from mpjax.data import open_source
from mpjax.errors import UsageError


NETWORKS = pathlib.Path(__file__).parents[1] / "models" / "image_text"
COLOURS = {"black": (0, 0, 0), "white": (255, 255, 255), "red": (255, 0, 0), "blue": (0, 0, 255)}
WHERE = ("above", "below")


@pytest.fixture
def pictures(tmp_path):
    """Squares of four colours, in the upper or the lower half of grey images, and a text of each."""
    draws = np.random.default_rng(0)
    for split, repeats in (("train", 8), ("test", 1)):
        folder = tmp_path / "pictures" / split
        folder.mkdir(parents=True)
        rows = []
        for number, (colour, where) in enumerate([(c, w) for c in COLOURS for w in WHERE] * repeats):
            image = draws.integers(100, 150, (8, 8, 3)).astype(np.uint8)
            image[:4] = COLOURS[colour] if where == "above" else image[:4]
            image[4:] = COLOURS[colour] if where == "below" else image[4:]
            Image.fromarray(image).save(folder / f"{number}.png")
            rows.append((f"{number}.png", f"{colour} {where}"))
        with (folder / "metadata.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file_name", "text"), *rows])
    return tmp_path / "pictures"


def flags(pictures, kind, run):
    return (
        f"--task image_text --data.name folder:{pictures} --data.tokenizer bytes --data.length 14 --data.batch_size 8 "
        f"--data.eval_batch_size 8 --model.name hf:{NETWORKS / kind} --model.pretrained none --optimizer.name adamw "
        f"--optimizer.learning_rate 1e-2 --optimizer.warmup 5 --report.no_plot --report.no_tensorboard "
        f"--output_dir {run}"
    ).split()


@pytest.mark.slow
def test_every_command_reads_a_run_that_learned(pictures, tmp_path):
    run = str(tmp_path / "run")
    train(load_config([*flags(pictures, "clip", run), "--steps", "150", "--precision.policy", "bfloat16"]))
    found = evaluate_run(Evaluation(run=run))
    assert found["test/image_to_text"] >= 0.75  # at random 0.125
    assert found["test/text_to_image"] >= 0.75
    lines = tmp_path / "lines.jsonl"
    assert predict_run(Prediction(run=run, split="test", output=str(lines))) == 8
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    images, texts = (np.asarray([row[name] for row in rows]) for name in ("embedding", "text"))
    assert images.shape == texts.shape == (8, 32)
    np.testing.assert_allclose(np.linalg.norm(images, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose([row["cosine"] for row in rows], np.sum(images * texts, axis=1), atol=1e-5)
    one = Prediction(run=run, inputs=[str(pictures / "test" / "0.png")], output=str(lines))
    assert predict_run(one) == 1
    assert json.loads(lines.read_text()).keys() == {"input", "embedding"}
    export_run(Export(run=run, output=str(tmp_path / "out"), layout="huggingface"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "clip"


def test_folders_without_texts_are_refused(pictures, tmp_path):
    (pictures / "test" / "metadata.csv").write_text("file_name,text\n0.png,\n1.png,red\n")
    with pytest.raises(UsageError, match="the text of an image is '': wanted a text that is not empty"):
        train(load_config([*flags(pictures, "clip", tmp_path / "run"), "--steps", "1"]))
    (pictures / "test" / "metadata.csv").write_text("file_name,text\n9.png,red\n")
    with pytest.raises(UsageError, match="metadata.csv: there is no .*9.png .1 of 1 images are missing"):
        train(load_config([*flags(pictures, "clip", tmp_path / "run"), "--steps", "1"]))
    (pictures / "test" / "metadata.csv").unlink()
    with pytest.raises(UsageError, match="has no split 'test'; there are train"):
        train(load_config([*flags(pictures, "clip", tmp_path / "run"), "--steps", "1"]))


def test_a_last_batch_of_one_pair_is_an_error(pictures, tmp_path):
    """It would be right whatever the vectors are; of 8 pairs, batches of 8 leave none alone."""
    words = [*flags(pictures, "clip", tmp_path / "run"), "--steps", "1", "--data.eval_batch_size", "7"]
    with pytest.raises(
        UsageError, match="has 8 examples, and the last batch one alone, .* write --data.eval_batch_size 8"
    ):
        train(load_config(words))


def test_texts_that_are_cut_and_images_without_a_text_are_told(pictures):
    config = Data(name=f"folder:{pictures}", tokenizer="bytes", length=8)
    notes = open_source(config, pictures, "image_text").notes
    name = f"split 'train' of '{config.name}'"
    assert f"{name}: 64 of 64 texts looked at have more than 8 tokens and are cut to them (--data.length 8)" in notes
    whole = dataclasses.replace(config, length=14)
    assert not open_source(whole, pictures, "image_text").notes
    (pictures / "test" / "new.PNG").write_bytes((pictures / "test" / "0.png").read_bytes())
    (note,) = open_source(whole, pictures, "image_text").notes
    assert note == f"test: 1 images in {pictures / 'test'} have no row in metadata.csv and are left out"
