"""Whole records, whole files, errors that name the file."""

import ast
import errno
import io
import os
from pathlib import Path

import pytest

import mpjax
from mpjax.files import AppendFile, irregular_in, naming, write_atomically


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


def test_a_disk_that_fills_up_within_a_record_keeps_no_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "FileIO", FullAfterOneByte)
    file = AppendFile(tmp_path / "log", new=True)
    file.append(b"one\n")
    with pytest.raises(OSError, match="log"):
        file.append(b"two\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"one\n"


class FullAfterOneByte(io.FileIO):
    def write(self, record):
        if record == b"wo\n":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(record[:1] if record == b"two\n" else record)


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


def test_only_a_regular_file_is_replaced(tmp_path):
    (tmp_path / "precious").write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (link, tmp_path / "pipe", tmp_path / "folder", Path("/dev/null")):
        with pytest.raises(OSError, match=f"wanted a regular file or none: .*{path.name}"):
            write_atomically(path, b"theirs")
    with pytest.raises(OSError, match="link"):
        AppendFile(link, new=False)
    assert (tmp_path / "precious").read_text() == "mine"
    assert link.is_symlink()
    assert sorted(irregular_in(tmp_path)) == [link, tmp_path / "pipe"]


def test_no_link_in_the_place_of_a_temporary_file_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)  # a name that was guessed
    (tmp_path / ".summary.json.00000000.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "summary.json", b"theirs")
    assert not (tmp_path / "precious").exists()


def test_no_text_file_is_read_or_written_in_the_encoding_of_the_locale():
    package = Path(mpjax.__file__).parent
    calls = [
        (f"{file.relative_to(package)}:{call.lineno}", call.func, {keyword.arg for keyword in call.keywords})
        for file in package.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call)
    ]
    texts = [(where, named) for where, to, named in calls if getattr(to, "attr", "") in ("read_text", "write_text")]
    assert len(texts) > 10
    assert [where for where, named in texts if "encoding" not in named] == []
