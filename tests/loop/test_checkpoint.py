"""Writing checkpoints: the same position twice, beside a donated state, beside a leftover, on a full disk."""

import resource
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.loop import Checkpoints, complete_checkpoints, read_checkpoint


STATE = {"scale": jnp.float32(32768), "count": jnp.int32(7)}


def test_a_second_save_of_a_position_is_no_fault(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, STATE, {}, score=None)
    checkpoints.save(4, {**STATE, "count": jnp.int32(99)}, {}, score=1.0)
    checkpoints.close()
    assert int(read_checkpoint(tmp_path)[1]["count"]) == 7


def test_what_was_saved_does_not_change_with_the_donated_state(tmp_path):
    """The state is written in the background while the next step overwrites its buffers."""
    state = {"a": jnp.zeros(1_000_000)}
    overwrite = jax.jit(lambda s: {"a": s["a"] + 1}, donate_argnums=0)
    overwrite.lower(state).compile()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {}, score=None)
    for _ in range(5):
        state = overwrite(state)
    checkpoints.close()
    assert not read_checkpoint(tmp_path)[1]["a"].any()


def test_one_cut_short_is_passed_over_and_written_anew(tmp_path):
    """What SIGKILL leaves: a temporary folder beside the complete ones."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, STATE, {}, score=None)
    checkpoints.close()
    (tmp_path / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert read_checkpoint(tmp_path)[0] == 3
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, STATE, {}, score=None)
    checkpoints.close()
    assert read_checkpoint(tmp_path)[0] == 4


@pytest.mark.parametrize(
    "then", [lambda kept: kept.save(2, STATE, {}, score=None), Checkpoints.close], ids=["save", "close"]
)
def test_an_error_in_the_background_is_raised_by_the_next_save_and_by_close(tmp_path, then):
    """A file may not grow beyond 20 kB, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        checkpoints.save(1, {"w": np.random.default_rng(0).standard_normal(100_000)}, {}, score=None)
        with pytest.raises(OSError, match="OUT_OF_RANGE") as caught:
            then(checkpoints)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path)
    assert complete_checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", ["a[1]", "a\\b"])
def test_a_write_that_leaves_no_arrays_is_an_error(tmp_path, name):
    """Orbax takes the first name for a pattern, and tensorstore the second for another folder; both report success."""
    checkpoints = Checkpoints(tmp_path / name)
    checkpoints.save(1, STATE, {}, score=None)
    with pytest.raises(OSError, match="checkpoint 1 was written without its arrays"):
        checkpoints.close()


def test_no_thread_is_left_of_a_checkpoint_that_was_written(tmp_path):
    before = {thread.name for thread in threading.enumerate()}
    checkpoints = Checkpoints(tmp_path)
    for position in range(3):
        checkpoints.save(position, STATE, {}, score=None)
    checkpoints.close()
    left = [thread.name for thread in threading.enumerate() if thread.name not in before]
    assert [name for name in left if "_run_loop" in name or "save_finalize" in name] == []


def test_a_full_disk_is_a_system_error_that_names_the_folder(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def full(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing key in OCDBT database")

    monkeypatch.setattr(checkpoints._checkpointer, "save_checkpointables_async", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoints.save(1, {"w": np.zeros(2)}, {}, score=None)
    assert caught.value.filename == str(tmp_path)
    checkpoints.close()


NO_ROOM = """
import pathlib, resource, sys
import numpy as np
from mpjax import cli
from mpjax.loop.checkpoint import Checkpoints

def write():
    checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    checkpoints.save(1, {"w": np.random.default_rng(0).random(100_000)}, {}, score=None)
    checkpoints.close()

sys.exit(cli.exit_code(write))
"""


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_said_in_one_line(tmp_path):
    """Orbax logs the same error in each of its threads, with tracebacks of a thousand lines."""
    found = subprocess.run([sys.executable, "-c", NO_ROOM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: [Errno ")
    assert line.endswith(f"'{tmp_path}'")
