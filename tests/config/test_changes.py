"""In which settings a run differs from what it was."""

import dataclasses

import pytest
import tomli_w

from mpjax.config import REMOVED, Config, Distributed, changes, shared_settings, to_toml


def test_settings_that_make_another_run_are_named_with_both_values():
    config = Config()
    other = dataclasses.replace(
        config,
        seed=3,
        data=dataclasses.replace(config.data, name="synthetic:8x8x1:10", train_split="train[:50%]", batch_size=32),
        precision=dataclasses.replace(config.precision, policy="float32"),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=0.5),
    )
    assert list(changes(to_toml(config), to_toml(other))) == [
        ("data.batch_size", "64", "32"),
        ("data.name", "digits", "synthetic:8x8x1:10"),
        ("data.train_split", "train", "train[:50%]"),
        ("optimizer.learning_rate", str(config.optimizer.learning_rate), "0.5"),
        ("precision.policy", config.precision.policy, "float32"),
        ("seed", "0", "3"),
    ]


def test_where_things_are_and_how_long_it_takes_make_no_other_run():
    config = Config()
    other = dataclasses.replace(
        config,
        output_dir="b",
        resume=True,
        cache_dir="c",
        loop=dataclasses.replace(config.loop, keep=9),
        distributed=Distributed(processes=2, process=1),
    )
    assert list(changes(to_toml(config), to_toml(other))) == []


def test_a_setting_that_one_of_them_lacks_has_its_default():
    text = to_toml(Config())
    assert list(changes(text.replace("seed = 0\n", ""), text)) == []
    assert list(changes(text + '\n[later]\nsetting = "x"\n', text)) == [("later.setting", "x", "not set")]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_at_its_default_is_no_change(name):
    section, _, setting = name.rpartition(".")
    text, line = to_toml(Config()), tomli_w.dumps({setting: REMOVED[name].default})
    assert list(changes(text.replace(f"[{section}]\n", f"[{section}]\n{line}"), text)) == []


def test_processes_share_all_settings_but_where_each_finds_its_files():
    config = Config()
    own = dataclasses.replace(
        config,
        cache_dir="c",
        data=dataclasses.replace(config.data, data_dir="d"),
        distributed=Distributed(processes=2, process=1),
    )
    assert shared_settings(own) == shared_settings(config)
    other = shared_settings(dataclasses.replace(config, resume=True, loop=dataclasses.replace(config.loop, keep=9)))
    assert {name for name, value in other.items() if value != shared_settings(config)[name]} == {"resume", "loop.keep"}
