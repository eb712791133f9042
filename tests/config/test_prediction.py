"""The command line of predictions."""

import pytest

from mpjax.config.commands import Prediction
from mpjax.config.load import load_settings
from mpjax.errors import UsageError


def loaded(line):
    return load_settings((Prediction,), line.split(), prog="predict.py")[0]


def test_inputs_stand_without_a_flag():
    assert loaded("a.png b --run r --top 2 --skip_bad") == Prediction(
        inputs=("a.png", "b"), run="r", top=2, skip_bad=True
    )
    assert loaded("--run r --split test --output x.jsonl").split == "test"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--run r", "neither inputs nor --split: wanted one, such as photos/"),
        ("a --run r --split test", "both inputs and --split: wanted one"),
        ("a --run r --top 0", "--top is 0: wanted at least 1"),
        ("a --run r --batch_size -1", "--batch_size is -1: wanted at least 0"),
        ("a", "missing from predict.py: --run"),
    ],
)
def test_settings_that_predict_nothing_are_refused(line, message):
    with pytest.raises(UsageError, match=message):
        loaded(line)
