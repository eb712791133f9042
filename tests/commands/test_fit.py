"""Settings with `auto`: numbers are found once and stored."""

import dataclasses
import re
import shlex

import pytest

from mpjax.commands import fit, fitted, run
from mpjax.config import AUTO, Data, Training, from_toml, load_config
from mpjax.errors import UsageError


FLAGS = shlex.split("--model.name mlp --model.width 8 --data.name digits --steps 1 --loop.eval_every 0")


def of(flags, gather=None):
    return fitted(load_config([*FLAGS, *shlex.split(flags)]), *([gather] if gather else []))


@pytest.mark.slow
def test_a_run_stores_the_number_that_it_found(tmp_path, capsys):
    run(load_config([*FLAGS, "--data.batch_size", "auto", "--report.no_plot", "--output_dir", str(tmp_path / "run")]))
    stored = from_toml(tmp_path / "run" / "config.toml")
    assert stored.data.batch_size == 1024  # 1,437 examples
    printed = capsys.readouterr().out
    assert "--data.batch_size 1024 was found: the step takes" in printed
    assert re.match(r"a batch of 32 takes \d{2}(\.\d)? kB of ", printed)


@pytest.mark.slow
def test_memory_decides(monkeypatch):
    monkeypatch.setattr(fit, "memory_limit", lambda devices, processes: 270_000)
    config, _ = of("--data.batch_size auto")
    assert config.data.batch_size == 256
    config, _ = of("--data.batch_size auto --training.accumulate 2")
    assert config.data.batch_size == 512
    config, _ = of("--data.batch_size 512 --training.accumulate auto")
    assert config.training.accumulate == 2
    with pytest.raises(UsageError, match="--training.accumulate auto: a batch of 4 in any number of micro-batches"):
        of("--data.batch_size 4 --training.accumulate auto", lambda value: [value, 10])
    with pytest.raises(UsageError, match="--data.batch_size auto: a batch of 2 does not fit into the 10 B"):
        of("--data.batch_size auto", lambda value: [value, 10])
    with pytest.raises(UsageError, match="accumulate 1000 has 2000 examples, an epoch has 1,437; write a smaller"):
        of("--data.batch_size auto --training.accumulate 1000")


@pytest.mark.slow
def test_a_batch_is_at_most_an_epoch_of_a_mixture(tmp_path):
    file = tmp_path / "few.py"
    file.write_text(
        "from mpjax.data import synthetic_source\ndef source(): return synthetic_source(10, (8, 8, 1), 100)\n"
    )
    config, _ = of(f"--data.batch_size auto --data.name {file}:source --data.mix digits 0.5")
    assert config.data.batch_size == 128  # 100 examples, and as many of the 1,437 digits


def test_a_batch_that_does_not_divide_is_not_said_to_be_too_large():
    with pytest.raises(UsageError, match="a batch of 3 examples does not divide among 2 devices"):
        of("--data.batch_size 3 --training.accumulate auto")


@pytest.mark.slow
def test_a_generated_set_stays_small():
    config, _ = of("--data.batch_size auto --data.name synthetic:4x4x1:2")
    assert config.data.batch_size == 4096


def test_what_cannot_be_found_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="write a number for one of them"):
        of("--data.batch_size auto --training.accumulate auto")
    with pytest.raises(UsageError, match="--training.accumulate auto with --resume: the run has its number"):
        fitted(dataclasses.replace(load_config([*FLAGS, "--training.accumulate", "auto"]), resume=True))


def test_auto_is_a_word_in_python_and_no_other_word_is_taken():
    assert (Data(batch_size="auto").batch_size, Training(accumulate="auto").accumulate) == (AUTO, AUTO)  # pyright: ignore
    for wrong in ("0", "-1", "1.5", "all"):
        with pytest.raises(UsageError, match=f"wanted auto or a whole number from 1 on, got {wrong}"):
            load_config(["--data.batch_size", wrong])
