"""The settings of the search for a learning rate."""

import pytest

from mpjax.config import Config, RateSearch, load_settings
from mpjax.errors import UsageError


def loaded(flags):
    return load_settings((RateSearch, Config), flags.split(), prog="find_lr.py")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lowest 1 --highest 0.1", "wanted positive rates, the lowest first"),
        ("--lowest 0", "wanted positive rates, the lowest first"),
        ("--highest inf", "wanted positive rates, the lowest first"),
        ("--lowest nan", "wanted positive rates, the lowest first"),
        ("--updates 19", "--updates 19: wanted at least 20"),
        ("--stop_above 1", "--stop_above 1: wanted a number above 1"),
        ("--resume --output_dir x", "--resume: the search begins with fresh parameters"),
        ("--seeds 1 2", "--seeds: the search trains one model"),
        ("--seeds 5", "--seeds: the search trains one model"),
        ("--distributed.coordinator a:1", "--distributed: the search needs one process"),
    ],
)
def test_settings_that_make_no_sense_are_errors(flags, said):
    with pytest.raises(UsageError, match=said):
        loaded(flags)


def test_flags_of_the_search_and_of_the_run_stand_side_by_side():
    settings, config = loaded("--lowest 1e-5 --model.name mlp")
    assert (settings.lowest, settings.highest, settings.updates, config.model.name) == (1e-5, 10.0, 100, "mlp")


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            "--lowest 0 --updates 19 --seeds 1",
            ["--lowest 0 --highest", "--updates 19", "--seeds: the"],
        ),
        (
            "--lowest x --optimizer.momentum y",
            ["--lowest: could not", "--optimizer.momentum: could not"],
        ),
        (
            "--seed x --optimizer.momentum 2 --lowest x",
            ["--lowest: could", "--seed: inv", "--optimizer.momentum is"],
        ),
    ],
)
def test_faults_of_the_search_and_of_the_run_are_named_at_once(flags, lines):
    with pytest.raises(UsageError) as raised:
        loaded(flags)
    found = str(raised.value).splitlines()
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found
