"""A new user's first commands: what is missing is named together, and the second command runs."""

import functools
import shlex

import numpy as np
import pytest
from PIL import Image

from mpjax.commands import find_rate, flags, raise_together, run
from mpjax.config import RateSearch, load_config
from mpjax.errors import UsageError


TINY = shlex.split("--model.width 4 --steps 2 --loop.log_every 1 --report.no_tensorboard --report.no_plot")


def cells(folder):
    """Greyscale images beside masks of 0 and 255."""
    for index in range(20):
        bright = np.zeros((8, 8), bool)
        bright[index % 5 :, 2:6] = True
        for kind, pixels in (("images", 80 + 100 * bright), ("masks", 255 * bright)):
            path = folder / kind / f"{index}{'_mask' if kind == 'masks' else ''}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)


def reviews(folder):
    """A label and a text in each line, and no line of names."""
    folder.mkdir()
    lines = [f"{'neg' if at % 2 else 'pos'}\tfilm number {at} was {'dull' if at % 2 else 'fine'}\n" for at in range(90)]
    (folder / "all.tsv").write_text("".join(lines))


def flowers(folder):
    """JPEGs of several sizes in a folder for each class."""
    for index in range(100):
        path = folder / ("rose" if index % 2 else "daisy") / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + index % 3, 9), (200, 40 * (index % 2), 40)).save(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "first", "wanted"),
    [
        (
            cells,
            "--data.name folder:DATA --task segmentation --model.name unet --model.depth 1",
            "--data.train_split 'train[:90%]' --data.test_split 'train[90%:]' --data.mask_values 0 255 "
            "--data.batch_size 16",
        ),
        pytest.param(
            reviews,
            "--data.name DATA/all.tsv --task text_classification --model.depth 1 --model.heads 2 --data.length 16",
            "--data.name hf:DATA/all.tsv --data.header label text --data.train_split 'train[:90%]' --data.test_split "
            "'train[90%:]' --model.name bert",
            marks=pytest.mark.extra,
        ),
        (
            flowers,
            "--data.name DATA --model.name mlp",
            "--data.name folder:DATA --data.train_split 'train[:90%]' --data.test_split 'train[90%:]' "
            "--data.image_size 224",
        ),
    ],
)
def test_the_first_command_says_all_that_the_second_needs(tmp_path, make, first, wanted):
    if make is reviews:
        pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    make(tmp_path / "my data")
    data = str(tmp_path / "my data")
    given = [*(word.replace("DATA", data) for word in shlex.split(first)), *TINY, "--output_dir", str(tmp_path / "run")]
    with pytest.raises(UsageError, match="write all of these: ") as refused:
        run(load_config(given))
    written = shlex.split(str(refused.value).rpartition("write all of these: ")[2])
    assert written == [word.replace("DATA", data) for word in shlex.split(wanted)]
    smaller = ["--data.image_size", "8"] if make is flowers else []
    assert run(load_config([*given, *written, *smaller]))["steps"] == 2


def with_validation(folder):
    flowers(folder / "train")
    flowers(folder / "val")


def test_a_split_for_validation_is_proposed_with_the_rest(tmp_path):
    with_validation(tmp_path)
    config = load_config(["--data.name", str(tmp_path), "--model.name", "mlp", *TINY, "--data.image_size", "8"])
    with pytest.raises(UsageError, match=f"write all of these: --data.name folder:{tmp_path} --data.test_split val$"):
        run(config)


def test_a_single_fault_is_told_as_it_is(tmp_path):
    cells(tmp_path)
    flags = ["--data.train_split", "train[:90%]", "--data.test_split", "train[90%:]", "--data.batch_size", "8"]
    config = load_config([f"--data.name=folder:{tmp_path}", "--task=segmentation", "--model.name=unet", *flags])
    for command in (run, functools.partial(find_rate, RateSearch())):
        with pytest.raises(UsageError, match="^data set .*, from class 0; .*instead$") as refused:
            command(config)
        assert refused.value.repair == {"data.mask_values": (0, 255)}


def test_faults_end_with_one_that_has_no_repair(small):
    error = UsageError("too few", repair={"data.batch_size": 4, "model.heads": 2})
    says = "(?s)^too few\nthen: --model.heads 2: .*\nwrite all of these: "
    with pytest.raises(UsageError, match=says) as refused:
        raise_together(error, small)
    assert refused.value.__cause__ is error
    with pytest.raises(UsageError, match="^no way$"):
        raise_together(UsageError("no way"), small)


def test_a_repair_that_changes_nothing_is_not_repeated(small, monkeypatch):
    said = iter([UsageError("one", repair={"data.batch_size": 4}), UsageError("other", repair={"seed": 2})] * 9)
    first = next(said)

    def attempt(config):
        raise next(said)

    monkeypatch.setattr("mpjax.commands.lacking._attempt", attempt)
    with pytest.raises(UsageError, match="^one\nthen: other$") as refused:
        raise_together(first, small)
    assert refused.value.repair == {}
    said = iter([UsageError("same", repair={"seed": 2})] * 9)
    with pytest.raises(UsageError, match="^same$"):
        raise_together(next(said), small)


def test_a_setting_to_leave_out_is_no_flag_to_write(small, monkeypatch):
    monkeypatch.setattr("mpjax.commands.lacking._attempt", lambda config: named_as_batch(config.data.header))
    says = "^has names\nthen: batch of \\(\\)\nleave out --data.header\nwrite all of these: --data.batch_size 4$"
    error = UsageError("has names", repair={"data.header": (), "data.batch_size": 4})
    with pytest.raises(UsageError, match=says):
        raise_together(error, small)


def named_as_batch(header):
    raise UsageError(f"batch of {header}")


def test_flags_are_quoted_for_a_shell():
    assert flags({"data.name": "folder:my data", "data.header": ("a", "b")}) == (
        "--data.name 'folder:my data' --data.header a b"
    )
    assert flags({"data.header": (), "data.mix": {"folder:a": 0.3, "b": 0.1}}) == "--data.mix folder:a 0.3 b 0.1"
