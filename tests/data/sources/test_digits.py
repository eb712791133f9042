import errno
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mpjax.config import Data
from mpjax.data import open_source
from mpjax.data.sources import Digits, prepare_digits
from mpjax.errors import UsageError


PREPARE = """import pathlib, sys
from mpjax.data.sources.digits import prepare_digits
prepare_digits(pathlib.Path(sys.argv[1]))"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return open_source(Data(), tmp_path_factory.mktemp("digits"))


def test_sizes_shape_and_classes(digits):
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.fields["image"].shape == (8, 8, 1)
    assert digits.fields["label"].num_classes == 10


def test_every_fifth_image_is_tested_and_the_order_is_kept(digits):
    original = load_digits()
    assert [digits.test[i]["label"] for i in range(360)] == original.target[::5].tolist()
    assert [digits.train[i]["label"] for i in range(4)] == original.target[1:5].tolist()


def test_levels_0_to_16_are_stretched_to_0_to_255(digits):
    image = digits.test[0]["image"]
    assert image.dtype == np.uint8
    levels = load_digits().images[0]
    assert {int(level): int(image[..., 0][levels == level][0]) for level in (0, 5, 15)} == {0: 0, 5: 80, 15: 239}
    assert max(digits.test[i]["image"].max() for i in range(5)) == 255


def test_class_names_are_the_digits(tmp_path):
    from mpjax.data.sources import Digits

    assert Digits(data_dir=tmp_path).info.features["label"].names == list("0123456789")


def test_prints_nothing_and_needs_no_network(tmp_path, capfd, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    open_source(Data(), tmp_path)
    assert capfd.readouterr() == ("", "")


def test_leaves_progress_bars_as_they_were(tmp_path):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils import tqdm_utils

    tfds.enable_progress_bar()
    try:
        open_source(Data(), tmp_path)
        assert tqdm_utils._active
    finally:
        tfds.disable_progress_bar()


@pytest.mark.slow
def test_processes_may_prepare_at_once(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", PREPARE, tmp_path]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(open_source(Data(), tmp_path).train) == 1437
    assert [path.name for path in (tmp_path / "digits").iterdir()] == ["1.0.0"]


def test_losing_the_race_is_no_failure(tmp_path, monkeypatch):
    prepare = Digits.download_and_prepare

    def beaten(builder, **options):
        prepare(Digits(data_dir=tmp_path, file_format="array_record"), **options)
        raise OSError("Directory not empty")

    monkeypatch.setattr(Digits, "download_and_prepare", beaten)
    prepare_digits(tmp_path)


def test_a_real_failure_is_raised(tmp_path, monkeypatch):
    def fail(builder, **options):
        raise OSError("Input/output error")

    monkeypatch.setattr(Digits, "download_and_prepare", fail)
    with pytest.raises(OSError, match="Input/output"):
        prepare_digits(tmp_path)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write() failed: No space left on device")]
)
def test_a_full_disk_is_told_with_what_to_do(tmp_path, monkeypatch, error):
    def fail(builder, **options):
        raise error

    monkeypatch.setattr(Digits, "download_and_prepare", fail)
    with pytest.raises(UsageError, match=f"no space is left to write digits to {tmp_path}.*MPJAX_CACHE"):
        prepare_digits(tmp_path)


@pytest.mark.slow
def test_a_process_killed_halfway_leaves_nothing_that_counts(tmp_path):
    halfway = PREPARE.replace(
        "\nprepare_digits(",
        "\nimport os, signal, tensorflow_datasets as tfds; write = tfds.core.DatasetInfo.write_to_directory\n"
        "def die(*a, **k): write(*a, **k); os.kill(os.getpid(), signal.SIGKILL)\n"
        "tfds.core.DatasetInfo.write_to_directory = die\nprepare_digits(",
    )
    killed = subprocess.run([sys.executable, "-c", halfway, tmp_path], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "digits").iterdir()]
    assert len(left) == 1
    assert left[0].startswith("incomplete.")
    assert len(open_source(Data(), tmp_path).train) == 1437


def test_opening_again_writes_nothing(tmp_path):
    open_source(Data(), tmp_path)
    files = list(tmp_path.rglob("*"))
    for path in files:
        os.utime(path, (1, 1))
    open_source(Data(), tmp_path)
    assert {path: path.stat().st_mtime for path in tmp_path.rglob("*")} == dict.fromkeys(files, 1.0)
