"""The folder of a run of several processes. Resumption is in test_train.py and test_processes.py."""

import pytest

from mpjax.commands.run_folder import run_folder_of
from mpjax.config import Config
from mpjax.errors import UsageError


class TwoProcesses:
    """Process 0 of two, of which the other sees another storage."""

    first, process, processes = True, 0, 2

    def gather(self, value):
        return [value, False if value is True else value]


def test_a_process_that_does_not_see_the_folder_is_named(tmp_path):
    with pytest.raises(
        UsageError, match=r"run of process 0 is not there for process 1: all processes need one storage"
    ):
        run_folder_of(Config(output_dir=str(tmp_path / "run")), TwoProcesses())
    assert (tmp_path / "run" / "config.toml").exists()
