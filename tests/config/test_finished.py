"""Settings of a run that is there."""

import pytest

from mpjax.config import Config, Precision, config_of_run, to_toml, with_policy
from mpjax.errors import UsageError


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(UsageError, match=f"no run in {tmp_path} "):
        config_of_run(tmp_path)


def test_the_settings_are_those_of_config_toml(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(Config(seed=7)))
    assert config_of_run(tmp_path).seed == 7


def test_what_went_with_a_policy_goes_with_it():
    precision = Precision(
        policy="float16",
        mode="module",
        rules={"stem/*": "float32"},
        loss_scale="128",
        master_weights="on",
        stochastic_rounding=True,
        patience=3,
    )
    changed = with_policy(Config(precision=precision, seed=7), "float32")
    assert changed == Config(precision=Precision(policy="float32", rules={"stem/*": "float32"}, patience=3), seed=7)
    assert with_policy(changed, "float32", rules={}).precision.rules == {}
