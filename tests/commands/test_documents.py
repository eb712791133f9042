"""Runs whose documents are apart learn the same in every form, on every mesh."""

import jax
import numpy as np
import pytest

from mpjax.commands import build_run, fresh_state
from mpjax.config import load_config
from mpjax.errors import UsageError


pytestmark = pytest.mark.slow  # each compiles a training step

RUN = (
    "--task language_modeling --data.name docstrings --data.length 24 --data.batch_size 4 --data.eval_batch_size 4 "
    "--data.train_split train[:1%] --data.test_split test[:1%] --model.name gpt2 --model.width 16 --model.depth 2 "
    "--model.heads 2 --precision.policy float32 --optimizer.name adamw --optimizer.learning_rate 1e-2 --steps 100 "
    "--optimizer.warmup 0 "
)


def losses_of(flags):
    built = build_run(load_config(f"{RUN} {flags}".split()))
    state, losses = fresh_state(built), []
    for batch, _ in zip(built.batches.from_position(0), range(3), strict=False):
        state, metrics = built.train_step(state, jax.device_put(batch, built.batch_sharding))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.fixture(scope="module")
def apart():
    return losses_of("--data.documents apart")


def test_documents_that_are_apart_are_learned_otherwise(apart):
    assert np.abs(np.subtract(apart, losses_of(""))).max() > 1e-4


@pytest.mark.parametrize(
    "flags",
    [
        "--model.scan_blocks --training.remat dots --training.chunked_loss 20",
        "--training.remat full --training.accumulate 2",
        "--mesh.fsdp 2 --model.scan_blocks",
        "--mesh.tensor 2",
    ],
)
def test_every_form_learns_the_same(apart, flags):
    np.testing.assert_allclose(losses_of(f"--data.documents apart {flags}"), apart, rtol=2e-5)


def test_a_model_of_ones_own_that_cannot_is_an_error(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from flax import nnx\n"
        "class Net(nnx.Module):\n"
        "    documents = None\n"
        "    def __init__(self, fields, *, rngs):\n"
        "        self.embed = nnx.Embed(fields['tokens'].vocabulary, 8, rngs=rngs)\n"
        "    def __call__(self, tokens):\n"
        "        return self.embed.attend(self.embed(tokens))\n"
        "class Without(Net):\n"
        "    documents = property()\n"
    )
    base = RUN.replace("gpt2 --model.width 16 --model.depth 2 --model.heads 2", "{}") + "--data.documents apart"
    for name, says in (("Net", "computes the same without it"), ("Without", "it has no `documents`")):
        with pytest.raises(UsageError, match=says):
            build_run(load_config(base.format(f"{file}:{name}").split()))
