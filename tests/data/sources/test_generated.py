"""A set is written once, and nothing but its files remains of the writing."""

import errno
import sys
from types import SimpleNamespace

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import tqdm_utils

from mpjax.data.sources import prepare_digits, write_once
from mpjax.errors import UsageError


@pytest.fixture
def builder(tmp_path):
    """One that notes what it is told to write with."""
    given = []

    def download_and_prepare(download_config):
        given.append(download_config)

    return SimpleNamespace(name="tiny", data_path=tmp_path, given=given, download_and_prepare=download_and_prepare)


def failing(builder, error):
    def fail(download_config):
        raise error

    builder.download_and_prepare = fail
    return builder


@pytest.fixture(params=[True, False], ids=["bars", "no bars"])
def bars(request):
    before = tqdm_utils._active
    tfds.display_progress_bar(request.param)
    yield request.param
    tfds.display_progress_bar(before)


@pytest.mark.parametrize(("file", "times"), [("dataset_info.json", 0), ("tiny-train.array_record", 1)])
def test_only_a_folder_with_its_description_counts_as_written(builder, file, times):
    (builder.data_path / file).touch()
    write_once(builder)
    assert len(builder.given) == times


def test_no_finished_copy_is_looked_for_in_the_cloud(builder):
    write_once(builder)
    assert [config.try_download_gcs for config in builder.given] == [False]


def test_a_failure_leaves_progress_bars_as_they_were_on_or_off(builder, bars):
    with pytest.raises(RuntimeError, match="^torn$"):
        write_once(failing(builder, RuntimeError("torn")))
    assert tqdm_utils._active == bars


def test_what_is_printed_on_the_way_is_dropped_and_what_warns_is_not(builder, capsys):
    def talk(download_config):
        print("generating")
        print("careful", file=sys.stderr)

    builder.download_and_prepare = talk
    write_once(builder)
    assert capsys.readouterr() == ("", "careful\n")


def test_a_full_disk_is_known_by_its_number_in_any_language_and_keeps_its_cause(builder):
    full = OSError(errno.ENOSPC, "Auf dem Gerät ist kein Speicherplatz mehr verfügbar")
    with pytest.raises(UsageError, match="no space is left to write tiny to") as raised:
        write_once(failing(builder, full))
    assert raised.value.__cause__ is full


def test_a_disk_that_is_full_after_another_process_wrote_the_set_is_no_failure(builder):
    def beaten(download_config):
        (builder.data_path / "dataset_info.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    builder.download_and_prepare = beaten
    write_once(builder)


@pytest.mark.parametrize("file", ["data", "data/digits"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(
        UsageError, match=rf"{tmp_path / file} is a file; wanted a folder, .*write --data.data_dir DIR$"
    ):
        prepare_digits(tmp_path / "data")
