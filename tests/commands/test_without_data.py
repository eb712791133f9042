"""A checkpoint predicts and exports without the data that it was trained on."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import diagnose_run, evaluate_run, export_run, predict_run, run
from mpjax.config import Diagnose, Evaluation, Export, Prediction, load_config
from mpjax.errors import UsageError


QUIET = "--report.no_plot --report.no_tensorboard --data.batch_size 4 --data.eval_batch_size 4 --steps 1"
MLP = "--model.name mlp --model.width 4 --model.depth 1 --precision.policy float32"
SHADES = np.arange(16, dtype=np.float64).reshape(16, 1, 1, 1)
ARRAYS = {
    "uint8": {"image": np.full((16, 4, 4, 1), 16 * SHADES, np.uint8), "label": np.arange(16) % 3},
    "floats": {"image": np.full((16, 4, 4, 1), 5 + SHADES, np.float32), "label": np.arange(16) % 3},
    "numbers": {"image": np.full((16, 4, 4, 1), 16 * SHADES, np.uint8), "target": 1e5 + SHADES[:, 0, 0, 0]},
}
ROWS = "x,kind,price\n" + "".join(f"{n},{'ab'[n % 2]},{1e5 + n}\n" for n in range(16))
TEXTS = "def texts():\n    rows = {'text': ['a b', 'b c'] * 8, 'label': [0, 1] * 8}\n    return rows, rows\n"


@pytest.fixture
def trained(tmp_path, capsys):
    """Trains on data in the folder `data` for a step, and removes that folder; returns the folder of the run."""
    (tmp_path / "data").mkdir()

    def run_on(files, flags):
        for name, content in files.items():
            if isinstance(content, dict):
                np.savez(tmp_path / "data" / name, **content)
            else:
                (tmp_path / "data" / name).write_text(content)
        flags = flags.replace("DATA", str(tmp_path / "data"))
        run(load_config(f"--output_dir {tmp_path / 'run'} {QUIET} {flags}".split()))
        shutil.rmtree(tmp_path / "data")
        capsys.readouterr()
        return str(tmp_path / "run")

    return run_on


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def of_arrays(kind, more=""):
    split = "--data.train_split train --data.test_split train"
    return {"set.npz": ARRAYS[kind]}, f"--data.name DATA/set.npz {split} {MLP} {more}"


def test_images(trained, tmp_path, capsys):
    folder = trained(*of_arrays("uint8", "--data.num_classes 3"))
    Image.fromarray(np.full((4, 4), 48, np.uint8)).save(tmp_path / "new.png")
    predict_run(Prediction(run=folder, inputs=[str(tmp_path / "new.png")], top=3))
    (line,) = lines(capsys)
    assert sum(probability for _, probability in line["top"]) == pytest.approx(1)
    export_run(Export(run=folder, output=str(tmp_path / "weights.safetensors")))
    assert (tmp_path / "weights.safetensors").exists()


def test_data_that_have_moved_are_read_where_the_settings_of_the_run_say(trained, tmp_path, capsys):
    folder = trained(*of_arrays("uint8", "--data.num_classes 3"))
    says = rf"there is no file .*/data/set.npz.*\nIf the data .* elsewhere, change data.name in {folder}/config.toml"
    for command in (
        lambda: evaluate_run(Evaluation(run=folder)),
        lambda: predict_run(Prediction(run=folder, split="test[:2]")),
        lambda: export_run(Export(run=folder, what="program", output=str(tmp_path / "program"))),
        lambda: diagnose_run(Diagnose(run=folder)),
    ):
        with pytest.raises(UsageError, match=says):
            command()
    np.savez(tmp_path / "moved.npz", **ARRAYS["uint8"])
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("data/set.npz", "moved.npz"))
    assert evaluate_run(Evaluation(run=folder))["test/loss"] == pytest.approx(1.0986, abs=0.1)  # log(3)


def test_images_whose_augmentation_is_gone_too(trained, tmp_path):
    files, flags = of_arrays("uint8", "--data.num_classes 3 --data.augment DATA/own.py:same")
    folder = trained({**files, "own.py": "def same(batch, key):\n    return batch\n"}, flags)
    export_run(Export(run=folder, output=str(tmp_path / "weights.safetensors"), trust_code=True))
    assert (tmp_path / "weights.safetensors").exists()


def test_floats_that_are_not_scaled_are_still_not_mixed_with_bytes(trained, tmp_path):
    folder = trained(*of_arrays("floats", "--data.num_classes 3"))
    Image.fromarray(np.full((4, 4), 48, np.uint8)).save(tmp_path / "new.png")
    with pytest.raises(UsageError, match="image is uint8, that of the training set is float32"):
        predict_run(Prediction(run=folder, inputs=[str(tmp_path / "new.png")]))


def test_numbers_come_in_the_units_of_the_data(trained, tmp_path, capsys):
    folder = trained(*of_arrays("numbers", "--task regression"))
    Image.fromarray(np.full((4, 4), 48, np.uint8)).save(tmp_path / "new.png")
    predict_run(Prediction(run=folder, inputs=[str(tmp_path / "new.png")]))
    (line,) = lines(capsys)
    assert 99_900 < line["prediction"]["target"] < 100_100


def test_rows_of_a_table(trained, tmp_path, capsys):
    split = "--data.train_split train[:12] --data.test_split train[12:]"
    flags = f"--task regression --data.name tabular:DATA/rows.csv --data.targets price {split} {MLP}"
    folder = trained({"rows.csv": ROWS}, flags)
    (tmp_path / "new.csv").write_text("x,kind\n3,a\n4,b\n")
    predict_run(Prediction(run=folder, inputs=[str(tmp_path / "new.csv")]))
    assert [99_900 < line["prediction"]["price"] < 100_100 for line in lines(capsys)] == [True, True]


@pytest.mark.slow
def test_texts_whose_code_is_gone_too(trained, tmp_path, capsys):
    sizes = "--model.name bert --model.width 8 --model.depth 1 --model.heads 1 --data.length 8 --data.num_classes 2"
    folder = trained({"own.py": TEXTS}, f"--task text_classification --data.name DATA/own.py:texts {sizes}")
    (tmp_path / "new.txt").write_text("a b\n")
    predict_run(Prediction(run=folder, inputs=[str(tmp_path / "new.txt")], trust_code=True))
    (line,) = lines(capsys)
    assert {name for name, _ in line["top"]} == {0, 1}
