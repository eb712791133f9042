"""The data that a stored run names are told, and read as data alone."""

import pathlib

import pytest

from mpjax.config import GENERATED, config_of_run, data_folder, load_config


def stored_run(folder, text):
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.toml").write_text(text)
    return folder / "run"


WAYS = {
    "evaluate, predict, diagnose, export": lambda run, *flags: config_of_run(run),
    "--resume": lambda run, *flags: load_config(["--resume", "--output_dir", str(run), *flags]),
    "--config": lambda run, *flags: load_config(["--config", str(run / "config.toml"), *flags]),
}
FIRST = WAYS["evaluate, predict, diagnose, export"]


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=name, marks=[] if way is FIRST else pytest.mark.slow) for name, way in WAYS.items()]
)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('data.name = "folder:/home/you/private"', "--data.name folder:/home/you/private"),
        ('data.name = "hf:csv:/home/you/taxes.csv"', "--data.name hf:csv:/home/you/taxes.csv"),
        ('data.name = "/home/you/private.NPZ"', "--data.name /home/you/private.NPZ"),
        ('data.name = "webdataset:/home/you"', "--data.name webdataset:/home/you"),
        ('data.mix = {"folder:/x" = 0.25, "digits" = 0.25}', "--data.mix folder:/x"),
        ('data.data_dir = "/home/you"', "--data.data_dir /home/you"),
        ('data.tokenizer = "/home/you/tokenizer.json"', "--data.tokenizer /home/you/tokenizer.json"),
        ('model.pretrained = "/home/you/w.safetensors"', "--model.pretrained /home/you/w.safetensors"),
        ('model.name = "hf:/home/you"\ndata.tokenizer = "bytes"', "--model.name hf:/home/you"),
        ('data.name = "folder:/a"\ndata.data_dir = "/b"', "--data.name folder:/a, --data.data_dir /b"),
        ('data.name = "folder:/\\u001b[2J"', "--data.name folder:/\\x1b[2J"),
        ('data.name = "digits"', None),
        ('data.name = "synthetic:8x8x1:10"\ndata.tokenizer = "words"', None),
    ],
)
def test_the_data_that_a_stored_run_names_are_told(tmp_path, capsys, way, settings, said):
    run = stored_run(tmp_path, settings + "\n")
    way(run)
    told = f"the run in {run} names what is read, as data alone: {said}\n" if said else ""
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("way", [WAYS["--resume"], WAYS["--config"]])
def test_data_that_the_command_line_names_are_not_told(tmp_path, capsys, way):
    run = stored_run(tmp_path, 'data.name = "folder:/a"\ndata.data_dir = "/b"\n')
    way(run, "--data.name", "folder:/mine")
    assert capsys.readouterr().err == f"the run in {run} names what is read, as data alone: --data.data_dir /b\n"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "digits" else pytest.mark.slow) for name in GENERATED]
)
def test_nothing_is_written_to_the_data_folder_of_a_stored_run(tmp_path, monkeypatch, way, name):
    monkeypatch.setenv("MPJAX_CACHE", str(tmp_path / "cache"))
    run = stored_run(tmp_path, f'data.name = "{name}"\ndata.data_dir = "/home/you"\n')
    assert data_folder(way(run)) == tmp_path / "cache" / "data"


def test_prepared_sets_are_read_from_the_data_folder_of_a_stored_run_and_from_yours_whatever_they_are(tmp_path):
    run = stored_run(tmp_path, 'data.name = "mnist"\ndata.data_dir = "/home/you"\n')
    assert data_folder(config_of_run(run)) == pathlib.Path("/home/you")
    mine = ["--data.name", "digits", "--data.data_dir", "/home/you"]
    assert data_folder(load_config(["--config", str(run / "config.toml"), *mine])) == pathlib.Path("/home/you")
