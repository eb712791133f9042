"""Numbers that no run can have are refused by name."""

import dataclasses

import pytest

from mpjax.config import Config, load_config
from mpjax.config.limits import check
from mpjax.config.schema import Data
from mpjax.errors import UsageError


def test_the_default_settings_pass():
    check(Config())


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("data.batch_size", "0", "--data.batch_size is 0: wanted at least 1"),
        ("data.eval_batch_size", "-3", "--data.eval_batch_size is -3: wanted at least 1"),
        ("data.workers", "-1", "--data.workers is -1: wanted 0 or more"),
        ("model.width", "-1", "--model.width is -1: wanted 0 or more"),
        ("model.depth", "-1", "--model.depth is -1: wanted 0 or more"),
        ("precision.patience", "0", "--precision.patience is 0: wanted at least 1"),
        ("training.accumulate", "0", "--training.accumulate is 0: wanted at least 1"),
        ("loop.keep", "0", "--loop.keep is 0: wanted at least 1"),
        ("optimizer.learning_rate", "-0.1", "--optimizer.learning_rate is -0.1: wanted 0 or more"),
        ("optimizer.learning_rate", "nan", "--optimizer.learning_rate is nan: wanted 0 or more"),
        ("optimizer.weight_decay", "inf", "--optimizer.weight_decay is inf: wanted 0 or more"),
        ("seed", "-1", "--seed is -1: wanted 0 or more"),
        ("optimizer.momentum", "1", "--optimizer.momentum is 1.0: wanted from 0 up to, not including, 1"),
        ("training.ema", "1.5", "--training.ema is 1.5: wanted from 0 up to, not including, 1"),
        ("training.label_smoothing", "-0.1", "--training.label_smoothing is -0.1: wanted from 0 up to"),
        ("steps", "0", "--steps is 0: wanted at least one step"),
        ("steps", "0 epochs", "--steps is 0 epochs: wanted at least one step"),
        ("data.std", "0", r"--data.std is \(0.0,\): wanted positive numbers"),
    ],
)
def test_a_number_out_of_range_is_named(flag, value, says):
    with pytest.raises(UsageError, match=says):
        check(load_config([f"--{flag}={value}"]))


def test_all_faults_are_named_at_once():
    config = Config()
    config = dataclasses.replace(config, seed=-1, data=dataclasses.replace(config.data, batch_size=0))
    with pytest.raises(UsageError) as raised:
        check(config)
    assert str(raised.value).splitlines() == [
        "--data.batch_size is 0: wanted at least 1",
        "--seed is -1: wanted 0 or more",
    ]


@pytest.mark.parametrize("count", [2**31, 10**400])
def test_a_number_that_no_array_can_count_is_refused(count):
    with pytest.raises(UsageError, match=f"--data.batch_size is {count}: wanted at most 2,147,483,647"):
        check(Config(data=Data(batch_size=count)))
