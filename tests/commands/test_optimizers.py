"""Runs with optimizers of optax and of the user, with frozen parameters and rates by pattern."""

import json

import jax
import numpy as np
import pytest

from mpjax.commands import build_run, fresh_state, run
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.loop import read_checkpoint
from mpjax.training import state_shapes


pytestmark = pytest.mark.slow  # each runs whole commands; what they are made of has tests of its own


MLP = "--model.name mlp --model.width 8 --data.name synthetic:4x4x1:3 --data.batch_size 20 --data.eval_batch_size 50"
EVERY = "--diagnosis.every 2"
QUIET = "--report.no_plot --report.no_tensorboard"


def config_of(flags):
    return load_config(f"{MLP} --optimizer.warmup 1 --steps 4 {flags}".split())


def steps_of(flags, steps=3):
    """The states on the host, before the first step and after each."""
    config = config_of(flags)
    built = build_run(config)
    state = fresh_state(built)
    found = [jax.device_get(state)]
    for batch, _ in zip(built.batches.from_position(0), range(steps), strict=False):
        state, _ = built.train_step(built.packing.pack(state), jax.device_put(batch, built.batch_sharding))
        state = built.packing.unpack(state)
        found.append(jax.device_get(state))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["novograd", "adafactor --optimizer.arguments min_dim_size_to_factor 4"])
def test_norms_of_arrays_that_are_divided_are_of_the_whole(optimizer, monkeypatch):
    """Both look at whole arrays: the norm of each, and its rows and columns."""
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    flags = f"--precision.policy float32 --optimizer.clip_norm 0.5 --optimizer.name {optimizer} --mesh.data"
    whole, divided = (steps_of(f"{flags} {mesh}") for mesh in ("2", "1 --mesh.fsdp 2"))
    for one, other in zip(jax.tree.leaves(whole[-1]), jax.tree.leaves(divided[-1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_frozen_arrays_of_several_devices_keep_every_bit(monkeypatch):
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    flags = "--optimizer.name lion --training.freeze layers/0 --training.ema 0.9 --training.accumulate 2"
    before, *_, after = steps_of(f"{flags} --mesh.data 1 --mesh.fsdp 2")
    for name, param in after.params.items():
        frozen = name.startswith("layers/0")
        assert (param.tobytes() == before.params[name].tobytes()) == frozen
        assert (name in after.ema) == (not frozen)  # what is not trained has no average
        assert frozen or after.ema[name].tobytes() != before.ema[name].tobytes()


OWN_FILE = """
import optax

def mine(learning_rate, steps, momentum=0.5):
    assert steps == 4
    return optax.chain(optax.trace(momentum), optax.scale_by_learning_rate(learning_rate))

def falling(peak, steps):
    return optax.exponential_decay(peak, steps, 0.1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with an optimizer and a schedule of the user, frozen parameters and rates, stopped once and resumed."""
    root = tmp_path_factory.mktemp("own")
    (root / "own.py").write_text(OWN_FILE)
    flags = (
        f"--output_dir {root / 'run'} {QUIET} --loop.save_every 2 --loop.log_every 1 --loop.keep 9 --training.freeze "
        f"layers/0 --optimizer.rates head/* 10 --optimizer.name {root / 'own.py'}:mine --precision.policy float16 "
        f"--optimizer.arguments momentum 0.9 --optimizer.schedule {root / 'own.py'}:falling"
    )
    run(config_of(flags))
    return root / "run"


@pytest.mark.slow
def test_a_run_of_ones_own_optimizer_logs_the_applied_rate(folder):
    """A fifth of four steps is no warm-up: 0.1, then a tenth of it after four steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates == pytest.approx([0.1 * 0.1 ** (step / 4) for step in range(4)], rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_holds_frozen_parameters_without_moments(folder):
    saved = read_checkpoint(folder / "checkpoints")[1]
    assert "params/layers/0/kernel" in saved
    assert [name for name in saved if "layers/0" in name] == ["params/layers/0/bias", "params/layers/0/kernel"]
    assert any(name.endswith("trace/head/kernel") for name in saved)


def test_a_run_of_ones_own_optimizer_needs_trust_to_resume(folder):
    with pytest.raises(UsageError, match=r"optimizer.name .*own.py:mine, optimizer.schedule .*own.py:falling; read it"):
        load_config(["--resume", "--output_dir", str(folder)])
    run(load_config(["--resume", "--output_dir", str(folder), "--trust_code"]))


@pytest.mark.slow
def test_the_run_says_that_no_weight_decay_is_applied(tmp_path, capsys):
    run(config_of(f"--output_dir {tmp_path / 'a'} {QUIET} --optimizer.name adam --optimizer.learning_rate 0.01"))
    assert "no weight decay: adam takes no weight_decay" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--optimizer.name lyon", "--optimizer.name lion --optimizer.arguments b3 1"])
def test_an_optimizer_that_is_not_there_is_told_before_data_is_looked_for(flags):
    with pytest.raises(UsageError, match="--optimizer") as raised:
        build_run(config_of(f"--data.name no_such_set {flags}"))
    assert "no_such_set" not in str(raised.value)


def test_frozen_blocks_of_a_stack_have_no_update_one_by_one_either():
    """A diagnosis of a run with stacks uses the run's optimizer on single blocks."""
    vit = "--model.name vit_ti16 --model.width 8 --model.depth 2 --model.heads 2 --model.patch 2 --model.scan_blocks"
    built = build_run(config_of(f"{vit} --training.freeze blocks/* --optimizer.layer_decay 0.5 --optimizer.name adamw"))
    shapes = state_shapes(built.task, built.learner.tx, ema=False, layout=built.layout)

    def updates_of(state):
        single = built.block_by_block(state)
        return built.learner.tx.update(single.params, single.opt_state, single.params)[0]

    assert not any("blocks" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes.opt_state))
    assert "blocks/1/mlp/up/kernel" in jax.eval_shape(updates_of, shapes)


@pytest.mark.slow
def test_layer_statistics_are_of_optimizers_that_take_the_loss_too(tmp_path):
    run(config_of(f"--output_dir {tmp_path / 'a'} {QUIET} --optimizer.name momo --training.freeze layers/0 {EVERY}"))
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    updates = next(line["layers"]["update"] for line in lines if "layers" in line)
    assert updates["layers/0/kernel"]["largest"] == 0
    assert updates["head/kernel"]["largest"] > 0
