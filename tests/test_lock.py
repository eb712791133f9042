"""One process at a time writes a run."""

import subprocess
import sys

import pytest

from mpjax.errors import UsageError
from mpjax.files import locked


def test_a_second_process_is_refused_with_the_name_of_the_first_while_that_lives(tmp_path):
    code = "import sys; from pathlib import Path; from mpjax.files import locked\n"
    code += "with locked(Path(sys.argv[1]), str): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=f"{tmp_path} is in use by process 7 on a: wait until it ends, stop it"),
            locked(tmp_path, lambda: "process 7 on a"),
        ):
            pass
        other.kill()
        other.wait()
    with locked(tmp_path, str):
        pass


def test_one_after_the_other_may_hold_it(tmp_path):
    for _ in range(2):
        with locked(tmp_path, str):
            assert list(tmp_path.iterdir()) == []
