"""Runs that are resumed on other data than that of their checkpoint."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import run
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.loop import complete_checkpoints, digest_of, read_checkpoint


FLAGS = shlex.split("""
--model.name mlp --model.width 8 --data.batch_size 8 --data.eval_batch_size 6 --data.train_split train[:12]
--data.test_split train[12:] --report.no_tensorboard --report.no_plot
""")


def start(tmp_path, values):
    """Trains for a step on a folder of images, each filled with a value."""
    for index, value in enumerate(values):
        path = tmp_path / "data" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), value)).save(path)
    name = f"folder:{tmp_path / 'data'}"
    run(load_config([*FLAGS, "--data.name", name, "--output_dir", str(tmp_path / "run"), "--steps", "1"]))


@pytest.fixture
def begun(tmp_path):
    """The folder of such a run, and that of its data."""
    start(tmp_path, np.arange(18, dtype=np.uint8))
    return tmp_path / "run", tmp_path / "data"


def resume(folder, *flags):
    return run(load_config(["--resume", "--output_dir", str(folder), *flags]))


def change(data):
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(data / "a" / "0.png")


def test_it_is_refused_unless_said_and_told(begun, capsys):
    folder, data = begun
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    change(data)
    with pytest.raises(UsageError) as raised:
        resume(folder, "--steps", "2")
    message = str(raised.value)
    assert f"--resume: the data is not that of checkpoint 1 in {folder}:\n  " in message
    assert "image has other values" in message
    assert message.endswith("or, if this is meant, write --other_data")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    capsys.readouterr()
    resume(folder, "--steps", "2", "--other_data")
    assert "resumed on other data: " in capsys.readouterr().out
    assert "other_data = true" not in (folder / "config.toml").read_text()
    # The checkpoint that follows is of the new data, with a fingerprint of its own.
    one, two = (read_checkpoint(folder / "checkpoints", which)[2]["data"] for which in "12")
    assert one["train"]["examples"] == two["train"]["examples"] == 12
    assert one != two
    resume(folder, "--steps", "3")
    assert "other data" not in capsys.readouterr().out
    assert complete_checkpoints(folder / "checkpoints")[-1] == 3


@pytest.mark.slow
def test_a_checkpoint_of_before_without_a_fingerprint_is_resumed(begun, capsys):
    folder, data = begun
    about = folder / "checkpoints" / "1" / "about" / "data.json"
    if not about.is_file():
        about = about.with_name("metadata")
    described = json.loads(about.read_text())
    del described["data"]
    about.write_text(json.dumps(described | {"digest": digest_of(described)}))
    change(data)
    resume(folder, "--steps", "2")
    assert "resumed from step 1" in capsys.readouterr().out


@pytest.mark.slow
def test_16_bits_are_told_in_the_log_of_the_run(tmp_path, capsys):
    start(tmp_path, np.full(18, 300, np.uint16))
    printed = " ".join(capsys.readouterr().out.split())
    assert "image: 16-bit grayscale, 0 is read as 0 and 65535 as 1; for another range" in printed
