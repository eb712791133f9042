"""A run from elsewhere runs no code unless the user says so."""

import shutil

import pytest

from mpjax.cli import train
from mpjax.config import Config, load_config, to_toml
from mpjax.config.folders import check_run_folder
from mpjax.config.schema import Data, Model, Optimizer
from mpjax.config.user_code import code_of, load_function, require_trust
from mpjax.errors import UsageError


@pytest.mark.parametrize(
    ("model", "preprocess", "named"),
    [
        ("resnet18", "", {}),
        ("evil.py:Net", "", {"model.name": "evil.py:Net"}),
        ("os:system", "evil.py:f", {"model.name": "os:system", "data.preprocess": "evil.py:f"}),
        ("mpjax.models.mlp:MLP", "", {}),
        ("mpjax.cli:main", "", {"model.name": "mpjax.cli:main"}),
        ("mpjaxevil:Net", "", {"model.name": "mpjaxevil:Net"}),
        ("mpjax.py:Net", "", {"model.name": "mpjax.py:Net"}),
        ("mpjax.evil.py:Net", "", {"model.name": "mpjax.evil.py:Net"}),
    ],
)
def test_code_is_what_is_outside_of_mpjax(model, preprocess, named):
    assert code_of(Config(model=Model(name=model), data=Data(preprocess=preprocess))) == named


def test_optimizers_and_schedules_of_the_user_are_code():
    own = Optimizer(name="evil.py:rule", schedule="evil.py:rate")
    assert code_of(Config(optimizer=own)) == {"optimizer.name": "evil.py:rule", "optimizer.schedule": "evil.py:rate"}
    assert code_of(Config(optimizer=Optimizer(name="lion", schedule="linear"))) == {}


def test_sets_of_a_mixture_may_be_code():
    mixture = Data(mix={"hf:a.parquet": 0.2, "evil.py:f": 0.1})
    assert code_of(Config(data=mixture)) == {"data.mix": "evil.py:f"}


def test_what_the_command_line_names_itself_is_trusted(tmp_path):
    stored = Config(model=Model(name="a.py:Net"))
    require_trust(stored, tmp_path, trusted=True)
    require_trust(stored, tmp_path, trusted=False, said=stored)
    with pytest.raises(UsageError, match=r"names code outside mpjax, .* here: model.name a.py:Net; read it, and"):
        require_trust(stored, tmp_path, trusted=False, said=Config(model=Model(name="b.py:Net")))


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


def test_trust_is_not_stored(downloaded):
    assert load_config(["--resume", "--output_dir", str(downloaded), "--trust_code"]).trust_code is False


def test_a_run_that_was_killed_before_it_began_is_started_again(tmp_path):
    (tmp_path / ".config.toml.0123456789abcdef").write_text("half")
    assert check_run_folder(Config(output_dir=str(tmp_path))) == tmp_path
