"""The folder of a run of several processes. Resumption is in test_train.py and test_processes.py."""

import pytest

from mpjax.commands import restored_if_refused, run_folder_of
from mpjax.config import Config
from mpjax.errors import UsageError


class TwoProcesses:
    """Process 0 of two, of which the other sees another storage."""

    first, process, processes = True, 0, 2

    def gather(self, value):
        return [value, False if value is True else value]


def test_a_process_that_does_not_see_the_folder_is_named_and_the_folder_is_not_left_in_the_way(tmp_path):
    with pytest.raises(
        UsageError, match=r"run of process 0 is not there for process 1: all processes need one storage"
    ):
        run_folder_of(Config(output_dir=str(tmp_path / "run")), TwoProcesses())
    assert not (tmp_path / "run").exists()


def train(folder, error, *, new, begins=False):
    """Writes as a run does, and ends with an error."""
    with restored_if_refused(folder, new=new) as begin:
        if begins:
            begin()
        (folder / "tensorboard").mkdir()
        (folder / "metrics.jsonl").touch()
        raise error


@pytest.mark.parametrize("new", [True, False])
def test_a_usage_error_before_the_first_step_restores_the_folder(tmp_path, new):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text("before")
    with pytest.raises(UsageError, match="wrong"):
        train(folder, UsageError("wrong"), new=new)
    assert folder.exists() is not new
    if not new:
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.toml"]
        assert (folder / "config.toml").read_text() == "before"


@pytest.mark.parametrize(("error", "begins"), [(UsageError("damaged"), True), (KeyboardInterrupt(), False)])
def test_what_began_or_was_interrupted_is_kept(tmp_path, error, begins):
    with pytest.raises(type(error)):
        train(tmp_path, error, new=True, begins=begins)
    assert (tmp_path / "metrics.jsonl").exists()
