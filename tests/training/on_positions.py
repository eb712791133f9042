"""Trains the same steps with divided and with whole positions, on four devices, and prints what came of both as JSON.

    python tests/training/on_positions.py MODEL [SETTING=VALUE ...]

The settings are those of a mesh that divides positions.

Runs in a process of its own, which has to have four devices.
"""

import json
import os
import sys

import jax
import numpy as np
from on_meshes import TINY

from mpjax.commands import fields_of, make_learner
from mpjax.config import load_config, with_settings
from mpjax.plan import random_batch
from mpjax.training import initial_state, make_mesh, plan_precision


STEPS, BATCH = 5, 4
TEXT = "--data.name docstrings --data.length 8 --model.width 32 --model.heads 4"
GPT2 = f"--task language_modeling {TEXT} --model.name gpt2"
ADAMW = f"--optimizer.name adamw --optimizer.learning_rate 1e-3 --data.batch_size {BATCH} --steps {STEPS}"
WIDE = GPT2.replace("--model.width 32", "--model.width 64")
"""With parameters that are large enough to be divided."""

DECODER = (
    f"--task language_modeling --data.name docstrings --data.length 8 --model.name hf:{TINY} --data.tokenizer bytes"
)
MODELS = {
    "gpt2": f"{GPT2} --model.depth 2 --model.dropout 0.1 --precision.policy float32 --mesh.data 1 --mesh.tensor 4",
    "gpt2 in a loop": f"{GPT2} --model.depth 2 --model.scan_blocks --training.remat full --training.chunked_loss 8 "
    "--training.accumulate 2 --precision.policy float32 --mesh.data 1 --mesh.fsdp 2 --mesh.tensor 2",
    "gpt2 in float16": f"{GPT2} --model.depth 1 --model.dropout 0.1 --precision.policy mixed_float16 --mesh.data 2 "
    "--mesh.tensor 2",
    "vit": "--data.name digits --data.image_size 8 --model.name vit_ti16 --model.patch 2 --model.width 32 "
    "--model.heads 4 --model.depth 2 --training.remat dots --precision.policy float32 --mesh.data 1 --mesh.tensor 4",
    "bert": f"--task text_classification {TEXT} --model.name bert --model.depth 2 --model.dropout 0.1 "
    "--precision.policy float32 --mesh.data 1 --mesh.tensor 4",
    "decoder": f"{DECODER} --data.documents apart --precision.policy float32 --mesh.data 2 --mesh.tensor 2",
    "gpt2 of parts": f"{WIDE} --model.depth 2 --data.documents apart --training.label_smoothing 0.1 "
    "--precision.policy float32 --mesh.data 4",
    "gpt2 of parts in a loop": f"{WIDE} --model.depth 2 --model.scan_blocks --training.remat full "
    "--training.chunked_loss 8 --training.accumulate 2 --precision.policy float32 --mesh.data 2 --mesh.tensor 2",
    "gpt2 of parts in float16": f"{WIDE} --model.depth 1 --precision.policy mixed_float16 --mesh.data 4",
    "decoder of parts": f"{DECODER} --data.documents apart --precision.policy float32 --mesh.data 4",
    "decoder of parts in a loop": f"{DECODER} --model.scan_blocks --training.remat dots --precision.policy float32 "
    "--mesh.data 2 --mesh.fsdp 2",
}


def train(config) -> dict:
    """The metrics of each step, and the parameters after the last, by path."""
    plan, fields = plan_precision(config.precision), fields_of(config)
    learner = make_learner(config, plan, fields, steps=STEPS, warmup=1)
    layout, _, step = learner.on(make_mesh(**config.mesh.sizes))
    state = initial_state(learner.task, learner.tx, seed=0, ema=False, layout=layout)
    sharding = layout.batch(size=BATCH, accumulate=config.training.accumulate)
    metrics = []
    for number in range(STEPS):
        batch = jax.device_put(dict(random_batch(fields, BATCH, number)), sharding)
        # Two programs at a time can wait for each other for ever, where there are fewer cores than devices.
        state, of_step = jax.block_until_ready(step(state, batch))
        metrics.append({name: float(value) for name, value in jax.device_get(of_step).items()})
    whole = jax.jit(lambda x: x, out_shardings=layout.replicated)(state.params)
    return {"metrics": metrics, "params": jax.device_get(whole)}


def main() -> None:
    config = load_config(f"{MODELS[sys.argv[1]]} {ADAMW}".split())
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    divided = dict(word.split("=") for word in sys.argv[2:])
    whole, shares = (
        train(with_settings(config, {name: json.loads(value) for name, value in changes.items()}))
        for changes in ({}, divided)
    )
    pairs = [(whole["params"][name], shares["params"][name]) for name in whole["params"]]
    difference = max(float(np.max(np.abs(a.astype(np.float64) - b))) for a, b in pairs)
    print()  # Gloo has printed on this line
    print(json.dumps({"whole": whole["metrics"], "shares": shares["metrics"], "difference": difference}))


if __name__ == "__main__":
    main()
