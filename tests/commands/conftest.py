"""Short runs, for the commands that read a run's folder."""

import pytest

from mpjax.commands.train import run
from mpjax.config import load_config


SMALL = "--model.name mlp --model.width 8 --data.name digits --optimizer.name adamw --optimizer.warmup 2"


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Trains a small MLP with the given flags and returns the folder of the run."""

    def train(flags: str):
        folder = tmp_path_factory.mktemp("runs") / "a"
        run(load_config(f"--output_dir {folder} {SMALL} {flags} --report.no_plot --report.no_tensorboard".split()))
        return folder

    return train
