"""Short runs, for the commands that read a run's folder."""

import json

import pytest

from mpjax.commands import run
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


@pytest.fixture
def chat_flags(chat_tokenizer, tmp_path, monkeypatch):
    """Makes the arguments of a run of a small GPT-2 on 16 rows of conversations, half of them to test."""

    def chat_flags(task, rows, steps):
        pytest.importorskip("datasets")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        data = "--data.train_split train[:8] --data.test_split train[8:] --data.length 32 --data.batch_size 4"
        model = "--model.name gpt2 --model.width 16 --model.depth 1 --model.heads 2 --precision.policy mixed_bfloat16"
        others = f"--task {task} --steps {steps} --report.no_plot --report.no_tensorboard {data} {model}"
        return ["--data.name", f"hf:{file}", "--data.tokenizer", str(chat_tokenizer), *others.split()]

    return chat_flags
