"""A damaged file of a prepared set is named, with the repair, whatever the damage."""

import errno
import random
import shutil

import pytest

from mpjax.config import Data
from mpjax.data import open_source
from mpjax.data.sources import PreparedExamples, prepare_digits
from mpjax.errors import UsageError


FILES = (
    "dataset_info.json",
    "features.json",
    "digits-train.array_record-00000-of-00001",
    "digits-test.array_record-00000-of-00001",
)
RECORDS = FILES[2:]


def flipped(content):
    return bytes(
        byte ^ 255 if index in (len(content) // 3, len(content) // 2) else byte for index, byte in enumerate(content)
    )


DAMAGE = {
    "a tenth": lambda content: content[: len(content) // 10],
    "all but the end": lambda content: content[:-100],
    "zeros": lambda content: bytes(len(content)),
    "zeros in the middle": lambda content: content[: len(content) // 3] + bytes(len(content) // 3) + content[-9:],
    "random": lambda content: random.Random(0).randbytes(len(content)),
    "flipped": flipped,
    "empty": lambda content: b"",
    "list": lambda content: b"[1, 2]",
    "object": lambda content: b"{}",
    "null": lambda content: b"null",
    "text": lambda content: b'"x"',
    "deep": lambda content: b"[" * 100_000,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare_digits(folder)
    return folder


def read(folder):
    """The number of examples that can be read."""
    source = open_source(Data(name="digits"), folder)
    return sum(len(split.__getitems__(range(len(split)))) for split in (source.train, source.test))


QUICK = ("a tenth", "random", "folder")


def marked(damage):
    return pytest.param(damage, marks=() if damage in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("name", "count"), [(RECORDS[0], 1437), (RECORDS[1], 360)])
def test_records_cut_where_a_block_ends_are_damaged_too(digits, tmp_path, name, count):
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "digits" / "1.0.0"
    (folder / name).write_bytes((folder / name).read_bytes()[: 2**16])
    with pytest.raises(UsageError, match=rf"{name} has 0 examples, and dataset_info.json says {count}: .* again$"):
        read(tmp_path)


def test_a_description_of_fewer_examples_is_damaged(digits, tmp_path):
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    info = tmp_path / "digits" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace('"1437"', '"1000"'))
    with pytest.raises(UsageError, match=f"{RECORDS[0]} has 1437 examples, and dataset_info.json says 1000: one of"):
        read(tmp_path)


@pytest.mark.parametrize("damage", [*map(marked, [*DAMAGE, "folder", "missing", "link"])])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_the_repair(digits, tmp_path, name, damage):
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "digits" / "1.0.0"
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    if damage in DAMAGE:
        file.write_bytes(DAMAGE[damage](content))
    elif damage == "folder":
        file.mkdir()
    elif damage == "link":
        file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError) as refused:
        read(tmp_path)
    said = str(refused.value)
    assert "\n" not in said
    assert name in said
    if name in RECORDS and damage in ("missing", "link"):
        assert said.endswith(f"wanted them in {folder}; copy the whole folder again")
        return
    assert said.endswith(f"delete {folder}, which is written again")


@pytest.mark.slow
def test_the_repair_repairs(tmp_path):
    prepare_digits(tmp_path)
    (tmp_path / "digits" / "1.0.0" / FILES[0]).write_bytes(b"")
    prepare_digits(tmp_path)  # does not look at a set that is there
    with pytest.raises(UsageError, match="which is written again$"):
        read(tmp_path)
    shutil.rmtree(tmp_path / "digits" / "1.0.0")
    assert read(tmp_path) == 1797


def test_a_set_that_mpjax_does_not_write_is_to_be_prepared_again(digits, tmp_path):
    shutil.copytree(digits / "digits" / "1.0.0", tmp_path / "scans" / "1.0.0")
    (tmp_path / "scans" / "1.0.0" / "dataset_info.json").write_bytes(b"{")
    with pytest.raises(UsageError, match="delete .*scans/1.0.0, and copy or prepare it again$"):
        open_source(Data(name="scans"), tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_a_machine_without_resources_is_no_damaged_file(error, tmp_path):
    class Records(list):
        def __getitems__(self, indices):
            raise error

    with pytest.raises(type(error)) as raised:
        PreparedExamples(Records(), bytes, tmp_path)[0]
    assert raised.value is error
