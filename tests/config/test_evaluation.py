"""The command line of an evaluation."""

import pytest

from mpjax.config import Evaluation, load_settings
from mpjax.errors import UsageError


def test_flags_become_settings():
    argv = ["--run", "runs/a", "--checkpoint", "40", "--policy", "float32", "--split", "train", "--ema", "--json"]
    assert load_settings((Evaluation,), argv, prog="evaluate.py")[0] == Evaluation(
        run="runs/a", checkpoint="40", policy="float32", split="train", ema=True, json=True
    )


def test_the_best_checkpoint_under_the_runs_own_policy_is_the_default():
    assert load_settings((Evaluation,), ["--run", "a"], prog="evaluate.py")[0] == Evaluation(
        run="a", checkpoint="best", policy=""
    )


def test_the_run_is_required():
    with pytest.raises(UsageError, match="^missing from evaluate.py: --run STR Folder of the run"):
        load_settings((Evaluation,), [], prog="evaluate.py")
