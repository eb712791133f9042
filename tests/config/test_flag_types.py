"""Types of settings with a parser of their own, as flags and back."""

import pytest

from mpjax.config import load_config, to_toml
from mpjax.config.durations import Duration
from mpjax.config.flag_types import epochs
from mpjax.errors import UsageError


def test_each_is_parsed_from_a_flag_and_written_as_it_is_read():
    flags = "--steps=3 epochs", "--model.name=vit_s16", "--optimizer.name=lion", "--optimizer.schedule=linear"
    config = load_config(flags)
    assert config.steps == epochs(3) == Duration(3, "epochs")
    assert (config.model.name, config.optimizer.name, config.optimizer.schedule) == ("vit_s16", "lion", "linear")
    assert 'steps = "3 epochs"' in to_toml(config)


@pytest.mark.parametrize("flag", ["--steps=3 weeks", "--model.name=resnet17", "--optimizer.schedule=cosinus"])
def test_a_wrong_word_is_an_error_that_names_the_flag(flag):
    with pytest.raises(UsageError, match=flag.partition("=")[0]):
        load_config([flag])
