"""Where a run and the cache are kept."""

import dataclasses
import pathlib
import re
import shlex

import pytest

from mpjax.config import (
    Config,
    Distributed,
    PythonObject,
    Report,
    cache_folder,
    config_of_run,
    data_folder,
    folders,
    from_toml,
    load_config,
    new_folder,
    resume_command,
    run_folder,
    run_settings,
    seeds_in,
)
from mpjax.errors import UsageError


CONFIG = Config()


def config_in(folder, **changes):
    return dataclasses.replace(CONFIG, output_dir=str(folder), **changes)


def test_the_cache_is_where_the_first_of_setting_and_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MPJAX_CACHE", raising=False)
    assert cache_folder(CONFIG) == tmp_path / "xdg" / "mpjax"
    monkeypatch.setenv("MPJAX_CACHE", str(tmp_path / "own"))
    assert cache_folder(CONFIG) == tmp_path / "own"
    assert cache_folder(dataclasses.replace(CONFIG, cache_dir=str(tmp_path / "set"))) == tmp_path / "set"
    assert (tmp_path / "set").is_dir()
    assert data_folder(CONFIG) == tmp_path / "own" / "data"


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("MPJAX_CACHE")
    assert cache_folder(CONFIG) == tmp_path / ".cache" / "mpjax"
    assert cache_folder(dataclasses.replace(CONFIG, cache_dir="~/cache")) == tmp_path / "cache"
    assert run_folder(config_in("~/run")) == tmp_path / "run"
    assert run_folder(config_in("~/run", resume=True)) == tmp_path / "run"


def test_a_new_run_makes_its_folder_or_takes_an_empty_one_and_writes_its_settings(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "a" / "b", tmp_path / "empty"):
        config = config_in(folder)
        assert run_folder(config) == folder
        assert from_toml(folder / "config.toml") == config


def test_a_folder_that_holds_something_is_never_taken(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"exists and holds no run to resume: write another --output_dir"):
        run_folder(config_in(tmp_path))
    (tmp_path / "config.toml").touch()
    with pytest.raises(UsageError, match=r"exists: write --resume to resume the run in it, or another --output_dir"):
        run_folder(config_in(tmp_path))
    with pytest.raises(UsageError, match="notes.txt is a file"):
        run_folder(config_in(tmp_path / "notes.txt"))
    with pytest.raises(UsageError, match=r"cannot make folder .*notes.txt/run: Not a directory"):
        run_folder(config_in(tmp_path / "notes.txt" / "run"))


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(UsageError, match=r"--resume: no run in .* \(no config.toml\); leave out --resume to start one"):
        run_folder(config_in(tmp_path, resume=True))


def test_without_a_name_a_run_is_named_for_data_model_policy_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run_folder(dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, name="synthetic:8x8x1:10")))
    assert folder.parent == pathlib.Path("runs")
    assert re.fullmatch(r"synthetic_8x8x1_10-resnet18-mixed_float16-\d{8}-\d{6}", folder.name)


def test_runs_that_start_in_the_same_second_without_a_name_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "_default_name", lambda config, prefix: pathlib.Path("runs", f"{prefix}a"))
    assert [str(run_folder(CONFIG)) for _ in range(3)] == ["runs/a", "runs/a-2", "runs/a-3"]
    assert from_toml("runs/a-2/config.toml").output_dir == "runs/a-2"
    assert [str(new_folder(CONFIG, prefix="b-")) for _ in range(2)] == ["runs/b-a", "runs/b-a-2"]


def test_of_two_runs_that_start_in_one_folder_at_once_one_is_refused(tmp_path, monkeypatch):
    """The second saw the folder empty, but the first had claimed it by then."""
    config = Config(output_dir=str(tmp_path / "run"))
    assert run_folder(config) == tmp_path / "run"
    monkeypatch.setattr(pathlib.Path, "iterdir", lambda self: iter(()))
    with pytest.raises(UsageError, match="exists: write --resume"):
        run_folder(config)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="run is a file: wanted a folder"):
        run_folder(Config(output_dir=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("name", "shown"), [("a[1]", "["), ("a*", "*"), ("a?", "?"), ("a\\b", "\\"), ("a\udcff", "\udcff")]
)
def test_a_path_that_checkpoints_cannot_be_written_with_is_refused(tmp_path, monkeypatch, name, shown):
    """Orbax takes it for a pattern, and tensorstore for another folder: training succeeded without arrays."""
    says = re.escape(f"with {shown!r} in its name; write another --output_dir")
    for folder in (tmp_path / name, tmp_path / name / "run"):
        with pytest.raises(UsageError, match=says):
            run_folder(config_in(folder))
        assert not folder.exists()
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UsageError, match=says):
        run_folder(config_in("run"))
    with pytest.raises(UsageError, match="rename it"):
        run_folder(config_in("run", resume=True))


def test_a_run_moved_below_a_backslash_is_not_read_but_one_below_a_pattern_is(tmp_path):
    """Its checkpoints were called damaged, with the advice to remove them."""
    for name in ("a[1]", "a\\b"):
        run_folder(config_in(tmp_path / "run")).rename(tmp_path / name)
    assert config_of_run(tmp_path / "a[1]").output_dir == str(tmp_path / "run")
    with pytest.raises(UsageError, match="rename or copy it$"):
        config_of_run(tmp_path / "a\\b")


def test_a_search_of_a_rate_may_be_below_a_pattern_but_not_below_what_is_not_utf8(tmp_path):
    assert new_folder(config_in(tmp_path / "a[1]"), prefix="find_lr-").is_dir()
    with pytest.raises(UsageError, match="write another --output_dir"):
        new_folder(config_in(tmp_path / "a\udcff"), prefix="find_lr-")


def test_what_is_for_one_command_is_not_in_the_settings_that_repeat_a_run(tmp_path):
    place = Distributed(coordinator="a:1", processes=2, process=1)
    once = config_in(tmp_path, resume=True, profile=True, distributed=place)
    assert run_settings(once, tmp_path) == run_settings(config_in(tmp_path), tmp_path)


def test_a_folder_with_runs_of_seeds_is_no_run_unless_it_is_one_itself(tmp_path):
    for name in ("seed_11", "seed_2", "seed_x"):
        run_folder(config_in(tmp_path / name))
    assert seeds_in(tmp_path) == (2, 11)
    (tmp_path / "metrics.jsonl").touch()
    assert seeds_in(tmp_path) == ()


def test_a_sweep_of_which_nothing_has_begun_is_no_run(tmp_path):
    folder = run_folder(config_in(tmp_path / "sweep", seeds=(0, 1)))
    with pytest.raises(UsageError, match="is for runs of several seeds, none of which has begun"):
        config_of_run(folder)


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, ""),
        ({"seeds": (3, 4)}, "--seeds 3 4"),
        ({"cache_dir": "my cache"}, "--cache_dir 'my cache'"),
        ({"report": Report(writers=("loggers.py:mine",))}, "--trust_code"),
    ],
)
def test_the_line_that_resumes_a_run_is_one_that_resumes_it(tmp_path, given, flags):
    config = config_in(tmp_path / "my run", **given)
    folder = run_folder(config)
    line = resume_command(config, folder)
    assert line == f"python scripts/train.py --resume --output_dir '{folder}' {flags}".rstrip()
    assert load_config(shlex.split(line)[2:]) == dataclasses.replace(config, resume=True)


def test_no_line_resumes_a_run_of_parts_given_in_python(tmp_path):
    assert resume_command(config_in(tmp_path, report=Report(writers=(PythonObject(len),))), tmp_path) == ""
