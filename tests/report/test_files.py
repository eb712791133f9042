"""Whole records, whole files, errors that name the file."""

import errno
import os
from pathlib import Path

import pytest

from mpjax.report.files import AppendFile, naming, write_atomically


FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def test_a_record_is_on_disk_at_once(tmp_path):
    file = AppendFile(tmp_path / "new" / "log", new=True)
    file.append(b"one\n")
    assert (tmp_path / "new" / "log").read_bytes() == b"one\n"
    file.close()


def test_a_new_file_never_overwrites(tmp_path):
    (tmp_path / "log").write_text("precious")
    with pytest.raises(FileExistsError):
        AppendFile(tmp_path / "log", new=True)
    assert (tmp_path / "log").read_text() == "precious"


@needs_full_device
def test_a_full_disk_names_the_file():
    file = AppendFile(FULL, new=False)
    with pytest.raises(OSError, match="/dev/full") as caught:
        file.append(b"one\n")
    assert caught.value.errno == errno.ENOSPC
    file.close()


def test_an_error_that_names_its_file_keeps_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, naming(Path("other")):
        (tmp_path / "missing").read_text()
    assert caught.value.filename == str(tmp_path / "missing")


def test_a_failed_replacement_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"summary\.json"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_sees_the_whole_old_file_or_the_whole_new_one(tmp_path):
    path = tmp_path / "run" / "summary.json"
    write_atomically(path, b"first, longer")
    with path.open("rb") as reader:
        write_atomically(path, b"second")
        assert reader.read() == b"first, longer"
    assert path.read_bytes() == b"second"
