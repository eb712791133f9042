"""Every field survives the way through TOML."""

import dataclasses
import typing

import pytest

from mpjax.config import Config, Duration, from_toml, save_config, to_toml


def _fields(section, path=()):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration):
            yield from _fields(value, (*path, field.name))
        else:
            hint = typing.get_type_hints(type(section))[field.name]
            yield ".".join((*path, field.name)), value, [c for c in typing.get_args(hint) if isinstance(c, str)]


def _other(value, choices):
    """A value that is not the default."""
    if choices:
        return next(choice for choice in choices if choice != value)
    others = {bool: lambda: not value, int: lambda: value + 3, float: lambda: value / 3 + 1e-7}
    others |= {str: lambda: "a b=ü", tuple: lambda: (0.1, -2.0), Duration: lambda: Duration(2.5, "epochs")}
    others |= {dict: lambda: {"stem/*": "float32", "type:Linear": "params=float32,compute=bfloat16"}}
    return others[type(value)]()


def _replaced(section, path, value):
    head, _, rest = path.partition(".")
    return dataclasses.replace(section, **{head: _replaced(getattr(section, head), rest, value) if rest else value})


FIELDS = {path: (value, choices) for path, value, choices in _fields(Config())}


def test_there_are_sections_of_fields():
    assert len(FIELDS) > 40
    assert "precision.rules" in FIELDS
    assert "steps" in FIELDS


SECTIONS = list(dict.fromkeys(path.partition(".")[0] if "." in path else "" for path in FIELDS))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_a_section_round_trips(section, tmp_path):
    special = {"seeds": (0, 7), "data.mask_values": (0, 255), "data.ignore_index": (255,), "data.header": ("a b", "c")}
    special |= dict.fromkeys(("data.targets", "data.drop", "data.categories", "data.missing"), ("a b", "c"))
    special |= {
        "report.plot_format": ("pdf", "svg"),
        "model.name": "mine.py:Net",
        "model.pretrained_skip": ("head/*", "stem/conv/*"),
    }
    special |= dict.fromkeys(("training.metrics", "loop.callbacks", "report.writers"), ("a.py:one", "b.py:two"))
    special |= {
        "optimizer.name": "mine.py:rule",
        "optimizer.schedule": "mine.py:rate",
        **dict.fromkeys(("training.freeze", "training.lora", "training.lora_trained"), ("stem/*", "b")),
        "mesh.rules": {"layers/*": "columns", "type:Linear": "whole"},
    }
    special |= {
        "optimizer.rates": {"head/*": 10.0, "b/0": 0.1},
        "optimizer.arguments": {"b2": "0.99", "betas": "(1, -2)"},
        "data.mix": {"hf:a.parquet": 0.3, "own.py:set": 0.001},
    }
    changed = Config()
    for path in FIELDS:
        if path != "resume" and (path.partition(".")[0] if "." in path else "") == section:
            before, changed = changed, _replaced(changed, path, special.get(path) or _other(*FIELDS[path]))
            assert changed != before, path
    save_config(changed, tmp_path / "config.toml")
    assert from_toml(tmp_path / "config.toml") == changed


def test_durations_are_written_as_they_are_typed():
    text = to_toml(dataclasses.replace(Config(), steps=Duration(500)))
    assert text.startswith("steps = 500\n")
    assert 'eval_every = "5 epochs"' in text


@pytest.mark.parametrize("setting", ["data.batch_size", "training.accumulate"])
def test_auto_is_written_as_it_is_typed(setting, tmp_path):
    config = _replaced(Config(), setting, "auto")
    save_config(config, tmp_path / "config.toml")
    assert f'{setting.partition(".")[2]} = "auto"' in (tmp_path / "config.toml").read_text()
    assert from_toml(tmp_path / "config.toml") == config


def test_the_order_of_rules_is_kept(tmp_path):
    config = _replaced(Config(), "precision.rules", {"b": "float32", "a": "float32"})
    save_config(config, tmp_path / "config.toml")
    assert list(from_toml(tmp_path / "config.toml").precision.rules) == ["b", "a"]
