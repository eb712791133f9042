"""Depthwise convolutions and squeeze and excitation over two devices: the steps of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.commands import fields_of, make_learner
from mpjax.config import load_config
from mpjax.models import ENTRIES, LARGE_STAGES, SMALL_STAGES, MobileNetV3
from mpjax.plan import random_batch
from mpjax.training import initial_state, make_mesh, make_train_step, plan_precision


@pytest.mark.slow
def test_steps_of_a_mobilenet_are_those_of_one_device(monkeypatch):
    """In float64, as batch norms of few examples amplify the last bits of float32."""
    stages = (SMALL_STAGES[2][:1], LARGE_STAGES[1][1:])
    entry = ENTRIES["mobilenetv3_small"]
    monkeypatch.setitem(ENTRIES, "mobilenetv3_small", entry._replace(make=functools.partial(MobileNetV3, stages, 64)))
    flags = "--model.name mobilenetv3_small --model.width 32 --training.batch_norm global --precision.policy float64"
    config = load_config([*flags.split(), "--data.batch_size", "16", "--optimizer.learning_rate", "1e-2"])
    fields = fields_of(config)
    losses, divided = {}, {}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for name, sizes in (("one", {}), ("fsdp", {"fsdp": 2, "data": 1})):
            learner = make_learner(config, plan_precision(config.precision), fields, steps=3, warmup=0)
            layout = learner.on(make_mesh(jax.devices() if sizes else jax.devices()[:1], **sizes)).layout
            task = learner.task
            state = initial_state(task, learner.tx, seed=0, ema=False, layout=layout)
            step = make_train_step(
                task.structure, learner.tx, task.objective.loss_of, prepare=task.objective.prepare, layout=layout
            )
            losses[name], divided[name] = [], len(layout.divided)
            for number in range(3):
                batch = jax.device_put(random_batch(fields, 16, number), layout.batch(size=16, accumulate=1))
                state, metrics = jax.block_until_ready(step(state, batch))
                losses[name].append([float(jnp.asarray(metrics[each])) for each in ("loss", "grad_norm")])
    assert divided == {"one": 0, "fsdp": 1}
    np.testing.assert_allclose(losses["fsdp"], losses["one"], rtol=1e-9)
    assert losses["one"][2][0] < losses["one"][0][0]
