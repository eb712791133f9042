"""Weights & Biases, with its package installed, offline."""

import numpy as np
import pytest

from mpjax.config import Config
from mpjax.errors import UsageError
from mpjax.extend import RunInfo
from mpjax.report import open_named_writers
from mpjax.report.loggers import open_wandb


pytestmark = pytest.mark.extra


@pytest.fixture
def run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "config.toml").write_text("steps = 3\n")
    yield RunInfo(tmp_path, Config(), 0, 3, True, [])
    wandb.teardown()  # it keeps its settings for the life of a process


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_a_run_offline_is_stored_and_goes_on_under_its_id(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for step in (1, 2):
        (writer,) = open_named_writers(["wandb"], run)
        writer.write(step, {"train/loss": 1.0 / step})
        writer.close()
        ids.append((run.folder / "wandb_id").read_text())
    assert ids[0] == ids[1]
    stored = list(run.folder.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb"))
    content = b"".join(file.read_bytes() for file in stored)
    assert b"train/loss" in content
    assert b"config.toml" in content


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_pictures_are_stored(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (writer,) = open_named_writers(["wandb"], run)
    writer.write(7, {"test/loss": 1.0})
    writer.images(7, {"masks/3": np.zeros((2, 3, 3), np.uint8)})
    writer.close()
    (picture,) = run.folder.glob("wandb/offline-run-*/files/media/images/masks/*.png")
    assert picture.name.startswith("3_7_")


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_no_key_is_an_error_before_the_run(run, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UsageError, match="no API key; write `wandb login`, or set WANDB_MODE=offline"):
        open_wandb(run)
