"""The command line of an export."""

import pytest

from mpjax.config import Export, load_settings
from mpjax.errors import UsageError


def test_flags_become_settings():
    argv = "--run runs/a --output a.safetensors --checkpoint 40 --ema --layout timm --dtype bfloat16"
    assert load_settings((Export,), argv.split(" "), prog="export.py")[0] == Export(
        run="runs/a", output="a.safetensors", checkpoint="40", ema=True, layout="timm", dtype="bfloat16"
    )


def test_the_best_checkpoint_in_our_own_layout_as_stored_is_the_default():
    (settings,) = load_settings((Export,), ["--run", "a", "--output", "b.safetensors"], prog="export.py")
    assert settings == Export(run="a", output="b.safetensors", checkpoint="best", ema=False, layout="mpjax", dtype="")


@pytest.mark.parametrize("missing", ["--run", "--output"])
def test_the_run_and_the_file_are_required(missing):
    given = {"--run": "a", "--output": "b.safetensors"}
    del given[missing]
    with pytest.raises(UsageError, match=missing):
        load_settings((Export,), [word for pair in given.items() for word in pair], prog="export.py")
