"""A run from elsewhere runs no code unless the user says so."""

import copy
import dataclasses
import importlib
import json
import pathlib
import pickle
import shutil
import types
from typing import Any

import pytest
from flax import nnx

from mpjax.cli import train
from mpjax.commands import choose_objective, run
from mpjax.config import (
    CODE,
    Config,
    Data,
    Model,
    Optimizer,
    PythonObject,
    Training,
    check_run_folder,
    code_of,
    files_of,
    from_toml,
    is_passed_in_python,
    load_config,
    load_function,
    require_trust,
    to_toml,
    wrong_types,
)
from mpjax.data import Table, as_task, open_source
from mpjax.data.augment import preparation_of
from mpjax.errors import UsageError
from mpjax.loop import load_callbacks
from mpjax.models import build_model
from mpjax.report import open_named_writers
from mpjax.training import find_rule, learning_rate_schedule


@pytest.mark.parametrize(
    ("model", "preprocess", "named"),
    [
        ("resnet18", "", {}),
        ("evil.py:Net", "", {"model.name": ("evil.py:Net",)}),
        ("hf:evil.py:Net", "", {}),
        ("os:system", "evil.py:f", {"model.name": ("os:system",), "data.preprocess": ("evil.py:f",)}),
        ("mpjax.models.mlp:MLP", "", {}),
        ("mpjax.models.mlp:MLP", "mpjax.models.mlp:MLP", {"data.preprocess": ("mpjax.models.mlp:MLP",)}),
        ("mpjax.models.pretrained:export", "", {"model.name": ("mpjax.models.pretrained:export",)}),
        ("mpjax.models.pretrained.files:f", "", {"model.name": ("mpjax.models.pretrained.files:f",)}),
        ("mpjax.cli:main", "", {"model.name": ("mpjax.cli:main",)}),
        ("mpjaxevil:Net", "", {"model.name": ("mpjaxevil:Net",)}),
        ("mpjax.py:Net", "", {"model.name": ("mpjax.py:Net",)}),
        ("mpjax.evil.py:Net", "", {"model.name": ("mpjax.evil.py:Net",)}),
    ],
)
def test_code_is_what_is_outside_of_mpjax(model, preprocess, named):
    assert code_of(Config(model=Model(name=model), data=Data(preprocess=preprocess))) == named


def test_optimizers_and_schedules_of_the_user_are_code():
    own = Optimizer(name="evil.py:rule", schedule="evil.py:rate")
    named = {"optimizer.name": ("evil.py:rule",), "optimizer.schedule": ("evil.py:rate",)}
    assert code_of(Config(optimizer=own)) == named
    assert code_of(Config(optimizer=Optimizer(name="lion", schedule="linear"))) == {}


def test_sets_of_a_mixture_may_be_code():
    mixture = Data(mix={"hf:a.parquet": 0.2, "evil.py:f": 0.1})
    assert code_of(Config(data=mixture)) == {"data.mix": ("evil.py:f",)}


def test_a_path_with_a_space_is_one_file():
    config = Config(model=Model(name="my models/net.py:Net"), training=Training(metrics=("a.py:f", "b c.py:g")))
    assert {flag: str(file) for flag, file in files_of(config).items()} == {
        "--model.name": "my models/net.py",
        "--training.metrics": "a.py",
        "--training.metrics (2)": "b c.py",
    }


def test_what_the_command_line_names_itself_is_trusted(tmp_path):
    stored = Config(model=Model(name="a.py:Net"))
    require_trust(stored, tmp_path, trusted=True)
    require_trust(stored, tmp_path, trusted=False, user_config=stored)
    with pytest.raises(UsageError, match=r"names code outside mpjax, .* here: model.name a.py:Net; read it, and"):
        require_trust(stored, tmp_path, trusted=False, user_config=Config(model=Model(name="b.py:Net")))


@pytest.fixture
def downloaded(tmp_path):
    """A run's folder whose settings name a model that leaves a trace when its file is executed, and trust it."""
    trace = str(tmp_path / "trace")
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({trace!r}).touch()\nNet = None\n")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = Config(model=Model(name=f"{tmp_path / 'evil.py'}:Net"), output_dir=str(run), trust_code=True)
    (run / "config.toml").write_text(to_toml(config))
    return run


def test_a_file_that_somebody_wrote_may_name_code(downloaded, capsys):
    shutil.copy(downloaded / "config.toml", downloaded.parent / "mine.toml")
    assert train(["--config", str(downloaded.parent / "mine.toml"), "--output_dir", str(downloaded / "again")]) == 2
    assert "has no Net" in capsys.readouterr().err


def test_a_file_that_exits_when_it_is_imported_is_an_error(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import sys\n\nNet = int\nsys.exit(0)\n")
    said = r"--model.name .*:Net: it called sys.exit\(0\) \(mine.py, line 4\) when .* was imported; put what"
    with pytest.raises(UsageError, match=said):
        load_function(f"{file}:Net", flag="--model.name")


def load(spec):
    return load_function(spec, flag="--model.name")


def test_all_settings_of_a_run_share_one_module_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text("class Net: pass\ndef loss(x): return isinstance(x, Net)\n")
    assert load(f"{tmp_path}/mine.py:loss")(load("mine.py:Net")())


def test_a_file_that_has_changed_is_executed_again_and_so_is_any_in_another_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("calls = []\ndef count(): calls.append(1); return len(calls)\n")
    assert (load(f"{file}:count")(), load(f"{file}:count")()) == (1, 2)
    with pytest.raises(UsageError, match="exists and holds no run"):
        run(Config(output_dir=str(tmp_path)))
    assert load(f"{file}:count")() == 1
    file.write_text("def count(): return 10\n")
    assert load(f"{file}:count")() == 10


@pytest.mark.parametrize("name", ["mine.py", "json.py"])  # json stays the module of that name
def test_a_file_may_define_dataclasses_whose_annotations_are_text(tmp_path, name):
    file = tmp_path / name
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Size:\n  width: int\n"
    )
    assert load(f"{file}:Size")(3).width == 3
    assert importlib.import_module("json") is json


NO: Any = types.SimpleNamespace()
LOADERS = {
    "model.name": lambda config: build_model(config.model, fields={}, rngs=nnx.Rngs(0)),
    "data.name": lambda config: open_source(config.data, pathlib.Path()),
    "data.mix": lambda config: open_source(config.data, pathlib.Path()),
    "data.preprocess": lambda config: as_task(Table("set", {}, NO), "classification", config.data),
    "data.augment": lambda config: preparation_of(config.data, {}),
    "training.objective": lambda config: choose_objective(config, NO, NO, NO, {}),
    "training.metrics": lambda config: choose_objective(config, NO, NO, NO, {}),
    "optimizer.name": lambda config: find_rule(config.optimizer),
    "optimizer.schedule": lambda config: learning_rate_schedule(config.optimizer, steps=10, warmup=0),
    "loop.callbacks": lambda config: load_callbacks(config.loop.callbacks),
    "report.writers": lambda config: open_named_writers(config.report.writers, NO),
}


@pytest.mark.parametrize(
    "again",
    [lambda x: x, pytest.param(lambda x: pickle.loads(pickle.dumps(x)), marks=pytest.mark.slow)],
    ids=["read", "sent"],
)
@pytest.mark.parametrize("setting", CODE)
def test_code_of_a_stored_run_is_refused_where_it_would_be_loaded(downloaded, setting, again):
    spec = f"{downloaded.parent / 'evil.py'}:Net"
    config = with_code(setting, {spec: 0.5} if setting == "data.mix" else spec)
    if setting != "data.name":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, name="synthetic:4x4x1:2"))
    (downloaded / "config.toml").write_text(to_toml(config))
    with pytest.raises(UsageError, match=r"evil.py:Net( 0.5)? is code that a stored run names; read it, and"):
        LOADERS[setting](again(from_toml(downloaded / "config.toml")))
    assert not (downloaded.parent / "trace").exists()
    with pytest.raises(UsageError, match="has no Net"):  # the same loader, of the user's own settings
        LOADERS[setting](again(config))
    assert (downloaded.parent / "trace").exists()


def test_trust_is_not_stored(downloaded):
    assert load_config(["--resume", "--output_dir", str(downloaded), "--trust_code"]).trust_code is False


def test_a_run_that_was_killed_before_it_began_is_started_again(tmp_path):
    (tmp_path / ".config.toml.0123456789abcdef").write_text("half")
    assert check_run_folder(Config(output_dir=str(tmp_path))) == tmp_path


IN_PYTHON = [setting for setting in CODE if setting != "data.mix"]


def with_code(setting, value):
    """The default settings with an object in a setting that names code."""
    section, name = setting.split(".")
    several = isinstance(getattr(getattr(Config(), section), name), tuple)
    changed = dataclasses.replace(getattr(Config(), section), **{name: (value,) if several else value})
    return dataclasses.replace(Config(), **{section: changed})


@pytest.mark.parametrize("setting", IN_PYTHON)
def test_settings_with_different_objects_differ(setting):
    one, other = lambda: 1, lambda: 2
    assert with_code(setting, PythonObject(one)) == with_code(setting, PythonObject(one))
    assert with_code(setting, PythonObject(one)) != with_code(setting, PythonObject(other))
    assert with_code(setting, PythonObject(one)) != with_code(setting, str(PythonObject(one)))


@pytest.mark.parametrize("setting", IN_PYTHON)
def test_a_setting_holds_the_object_and_a_stored_run_its_name(setting):
    config = with_code(setting, PythonObject(len))
    assert [*wrong_types(config)] == []
    assert '"python:len"' in to_toml(config)
    assert code_of(config) == {setting: ("python:len",)}
    assert is_passed_in_python("python:len")
    assert not is_passed_in_python("mypython:len")


def test_an_object_has_no_operation_of_text_that_could_lose_it():
    value = PythonObject(len)
    assert not isinstance(value, str)
    assert [name for name in vars(str) if not name.startswith("__") and hasattr(value, name)] == []
    for operation in (
        lambda: value + "",
        lambda: "" + value,
        lambda: value[:],
        lambda: "l" in value,
        lambda: {**value},
    ):
        with pytest.raises(TypeError):
            operation()
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.value = max


@pytest.mark.parametrize(
    "again", [lambda x: x, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), dataclasses.replace]
)
def test_a_copy_holds_the_same_object(again):
    config = with_code("training.objective", PythonObject(len))
    assert again(config) == config
    assert load_function(again(config).training.objective, flag="--training.objective") is len
    assert hash(again(config).training.objective) == hash(PythonObject(len))


def test_objects_that_cannot_be_compared_or_hashed_are_values_too():
    class Awkward:
        __hash__ = None

        def __eq__(self, other):
            raise ValueError("ambiguous")

        def method(self):
            pass

    source = Awkward()
    assert PythonObject(source) == PythonObject(source) != PythonObject(Awkward())
    assert {PythonObject(source): 1}[PythonObject(source)] == 1
    other = Awkward()
    assert PythonObject(source.method) == PythonObject(source.method) != PythonObject(other.method)
