"""The names of classes are those that a run was trained with, or every command that reads it refuses the data."""

import json

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import diagnose_run, evaluate_run, export_run, predict_run, run
from mpjax.config import Diagnose, Evaluation, Export, Prediction, load_config
from mpjax.errors import UsageError


@pytest.fixture
def pets(tmp_path):
    """The folder of a run on images of cats, dark, and dogs, bright."""
    for split in ("train", "test"):
        for number in range(8):
            name, shade = ("cat", 20) if number % 2 else ("dog", 200)
            file = tmp_path / "pets" / split / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4), shade + number, np.uint8)).save(file)
    quiet = "--report.no_plot --report.no_tensorboard --data.batch_size 4 --data.eval_batch_size 4 --steps 2"
    data = f"--data.name folder:{tmp_path / 'pets'} --model.name mlp --model.width 4"
    run(load_config(f"--output_dir {tmp_path / 'run'} {data} {quiet}".split()))
    return tmp_path


def renamed(pets, old, new):
    for split in ("train", "test"):
        (pets / "pets" / split / old).rename(pets / "pets" / split / new)


def test_no_command_gives_a_class_another_name(pets, capsys):
    folder, image = str(pets / "run"), str(pets / "pets/test/dog/0.png")
    evaluate_run(Evaluation(run=folder))
    renamed(pets, "cat", "zebra")
    says = r"predicts the classes 0: cat, 1: dog \(label\), and the data has 0: dog, 1: zebra now"
    for command in (
        lambda: evaluate_run(Evaluation(run=folder)),
        lambda: predict_run(Prediction(run=folder, split="test")),
        lambda: export_run(Export(run=folder, output=str(pets / "a.program"), what="program")),
        lambda: diagnose_run(Diagnose(run=folder, step=2, evaluation=True)),
    ):
        with pytest.raises(UsageError, match=says):
            command()
    capsys.readouterr()
    predict_run(Prediction(run=folder, inputs=[image]))  # with the names of the checkpoint
    assert {name for name, _ in json.loads(capsys.readouterr().out)["top"]} == {"cat", "dog"}


def test_another_number_of_classes_is_told_as_such(pets):
    for split in ("train", "test"):
        (pets / "pets" / split / "emu").mkdir()
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(pets / "pets" / split / "emu" / "9.png")
    with pytest.raises(UsageError, match="0: cat, 1: dog .*, and the data has 0: cat, 1: dog, 2: emu now: "):
        evaluate_run(Evaluation(run=str(pets / "run")))


def test_other_data_may_have_other_names(pets):
    renamed(pets, "dog", "emu")
    more = ["--resume", "--other_data", "--steps", "3"]
    run(load_config(["--output_dir", str(pets / "run"), *more]))
    assert evaluate_run(Evaluation(run=str(pets / "run"), checkpoint="3"))["test/loss"] > 0
    with pytest.raises(UsageError, match=r"the classes 0: cat, 1: dog \(label\), and the data has 0: cat, 1: emu now"):
        evaluate_run(Evaluation(run=str(pets / "run"), checkpoint="2"))


def arrays(folder, labels, dtype=np.uint8):
    split = {"image": np.full((8, 4, 4, 1), 9 * np.arange(8).reshape(8, 1, 1, 1), dtype), "label": np.array(labels)}
    np.savez(folder / "set.npz", **{f"{name}_{part}": x for part in ("train", "test") for name, x in split.items()})


@pytest.fixture
def numbers(tmp_path):
    """The folder of a run on an .npz whose classes are numbers."""
    arrays(tmp_path, [0, 1] * 4)
    quiet = "--report.no_plot --report.no_tensorboard --data.batch_size 4 --data.eval_batch_size 4 --steps 2"
    data = f"--data.name {tmp_path / 'set.npz'} --data.num_classes 2 --model.name mlp --model.width 4"
    run(load_config(f"--output_dir {tmp_path / 'run'} {data} {quiet}".split()))
    return tmp_path


@pytest.mark.parametrize(
    ("labels", "dtype", "says"),
    [
        (["bright", "dark"] * 4, np.uint8, "by number, without names .*, and the data has 0: bright, 1: dark now"),
        ([0, 1] * 4, np.float32, "trained on image with dtype uint8, and the data has float32 now"),
    ],
)
def test_classes_and_images_that_mean_something_else_are_refused(numbers, labels, dtype, says):
    evaluate_run(Evaluation(run=str(numbers / "run")))
    arrays(numbers, labels, dtype)
    for command in (
        lambda: evaluate_run(Evaluation(run=str(numbers / "run"))),
        lambda: predict_run(Prediction(run=str(numbers / "run"), split="test")),
        lambda: diagnose_run(Diagnose(run=str(numbers / "run"), step=2, evaluation=True)),
        lambda: diagnose_run(Diagnose(run=str(numbers / "run"), step=1)),  # of before the first checkpoint
    ):
        with pytest.raises(UsageError, match=says):
            command()
