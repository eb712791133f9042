"""Trains the same steps on several meshes of eight devices, and prints what came of each as JSON.

    python tests/training/on_meshes.py MODEL FOLDER [PORT PROCESS]

Runs in a process of its own, which has to have eight devices, or in two with four each. Everything that a mesh could
get wrong is on: accumulation, clipping by global norm, a moving average, and in one step an infinite loss of a single
example.
"""

import functools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.commands import fields_of, make_learner
from mpjax.config import load_config, with_settings
from mpjax.loop import Checkpoints, adopt, places_in, read_checkpoint
from mpjax.plan import random_batch
from mpjax.training import Mean, initial_state, make_mesh, make_train_step, plan_precision, state_shapes


STEPS, BAD, SAVED, BATCH = 20, 7, 10, 16
TINY = pathlib.Path(__file__).parents[1] / "models" / "decoder" / "tiny"
MODERNBERT = pathlib.Path(__file__).parents[1] / "models" / "encoder" / "modernbert"
DINOV2 = pathlib.Path(__file__).parents[1] / "models" / "vision" / "dinov2"
TOWERS = pathlib.Path(__file__).parents[1] / "models" / "image_text"
SWIN = pathlib.Path(__file__).parents[1] / "models" / "vision" / "swin"
T5 = pathlib.Path(__file__).parents[1] / "models" / "t5" / "tiny"
MODELS = {
    "gpt2": "--task language_modeling --data.name docstrings --data.length 8 --model.name gpt2 --model.width 64 "
    "--model.depth 1 --model.heads 4 --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "decoder": f"--task language_modeling --data.name docstrings --data.length 8 --model.name hf:{TINY} "
    "--data.tokenizer bytes --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "modernbert": f"--task text_classification --data.name docstrings --data.length 8 --model.name hf:{MODERNBERT} "
    "--data.tokenizer bytes --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "dinov2": f"--data.name digits --model.name hf:{DINOV2} --optimizer.name adamw --optimizer.learning_rate 1e-3 "
    "--precision.policy float32",
    "swin": f"--data.name digits --model.name hf:{SWIN} --optimizer.name adamw --optimizer.learning_rate 1e-3 "
    "--precision.policy float32",
    "t5": f"--task text_to_text --data.name {__file__}:pairs --data.length 8 --model.name hf:{T5} "
    "--data.tokenizer bytes --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "dit": "--task diffusion --data.name digits --model.name dit_s2 --model.width 16 --model.depth 1 --model.heads 4 "
    "--model.patch 4 --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "clip": f"--task image_text --data.name {__file__}:pictures --data.length 8 --model.name hf:{TOWERS / 'clip'} "
    "--data.tokenizer bytes --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "siglip": f"--task image_text --data.name {__file__}:pictures --data.length 8 --model.name hf:{TOWERS / 'siglip'} "
    "--data.tokenizer bytes --optimizer.name adamw --optimizer.learning_rate 1e-3 --precision.policy float32",
    "unet": "--task segmentation --data.name digits_canvas --model.name unet --model.width 4 --model.depth 1 "
    "--training.batch_norm global --optimizer.learning_rate 1e-2 --precision.policy float64",
}
SHARED = (
    "--precision.loss_scale dynamic --steps 20 --optimizer.warmup 2 --data.batch_size 16 "
    "--training.accumulate 2 --training.ema 0.9 --optimizer.clip_norm 1"
)
MESHES = {
    "one": {},
    "fsdp": {"fsdp": 8, "data": 1},
    "tensor": {"tensor": 4, "data": 2},
    "all": {"fsdp": 2, "tensor": 2, "data": 2},
    "sequence": {"fsdp": 2, "tensor": 2, "data": 2},
    "both": {"fsdp": 2, "data": 4},
}
ALONE = ("one", "fsdp", "tensor", "all", "sequence")
"""Meshes of one process with eight devices."""

IN_TWO = ("one", "both")
"""Meshes of two processes with four each; "one" is the first device of the first process."""


def pairs() -> tuple[dict, dict]:
    """A source and a target of each split; batches are drawn at random."""
    texts = {"source": ["a"], "target": ["b"]}
    return texts, texts


def pictures() -> tuple[dict, dict]:
    """An image and a text of each split; batches are drawn at random."""
    split = {"image": np.zeros((1, 8, 8, 3), np.uint8), "text": ["a"]}
    return split, split


class Run:
    """A model on one mesh."""

    def __init__(self, config, sizes):
        devices = jax.devices() if sizes else jax.local_devices()[:1]
        plan, fields = plan_precision(config.precision), fields_of(config)
        learner = make_learner(config, plan, fields, steps=STEPS, warmup=2)
        task, tx, layout = learner.task, learner.tx, learner.on(make_mesh(devices, **sizes)).layout
        # An objective that compares examples with each other divides a batch itself.
        parts = 1 if task.objective.divides else 2
        self.split = layout.batch(size=BATCH, accumulate=parts)
        self.divided = len(layout.divided)
        self.whole = NamedSharding(layout.mesh, PartitionSpec())
        self.fields = fields
        self.fresh = functools.partial(initial_state, task, tx, seed=0, ema=True, layout=layout)
        self.shapes = state_shapes(task, tx, ema=True, layout=layout)

        def loss_of(model, batch, key):
            loss, metrics = task.objective.loss_of(model, batch, key)
            return Mean(loss.total * (1 + jnp.sum(batch["poison"])), loss.weight), metrics

        self.step = make_train_step(
            task.structure, tx, loss_of, prepare=task.objective.prepare, accumulate=parts, ema=0.9, layout=layout
        )

    def train(self, state, start, stop):
        """Runs steps `start + 1` to `stop`; returns the state and the metrics of each step."""
        found = []
        for number in range(start + 1, stop + 1):
            batch = dict(random_batch(self.fields, BATCH, number))
            batch["poison"] = np.zeros(BATCH, np.float32)
            batch["poison"][3] = np.inf if number == BAD else 0
            # Two programs at a time can wait for each other for ever, where there are fewer cores than devices.
            state, metrics = jax.block_until_ready(self.step(state, jax.device_put(batch, self.split)))
            found.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        return state, found


def main() -> None:
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    config = load_config(f"{MODELS[name]} {SHARED}".split())
    jax.config.update("jax_enable_x64", config.precision.policy == "float64")
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    several = len(sys.argv) > 3
    if several:
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[4]))
    first = jax.process_index() == 0
    # ModernBERT's blocks pass on two arrays, Swin's images, and the towers have few patches: these are not divided.
    apart = name in ("modernbert", "swin", "clip", "siglip")
    which = IN_TWO if several else [mesh for mesh in ALONE if not (apart and mesh == "sequence")]
    runs = {
        mesh: Run(with_settings(config, {"mesh.sequence": mesh == "sequence"}), MESHES[mesh])
        for mesh in which
        if first or mesh != "one"
    }
    result = {}
    for mesh, run in runs.items():
        state, metrics = run.train(run.fresh(), 0, SAVED)
        if not several or mesh != "one":  # which a process cannot save by itself
            store = Checkpoints(folder / mesh, first=first)
            store.save(SAVED, state, {"config": "", "loss_scale": ""}, score=None)
            store.close()
        state, further = run.train(state, SAVED, STEPS)
        whole = jax.jit(lambda x: x, out_shardings=run.whole)((state.params, state.stats, state.ema))
        final = [
            {path: np.asarray(x, np.float64).ravel() for path, x in part.items()} for part in jax.device_get(whole)
        ]
        result[mesh] = {"metrics": metrics + further, "divided": run.divided, "resumed": {}, "final": final}
    for saved in sorted(folder.iterdir()):
        for mesh, run in runs.items():
            state = adopt(run.shapes, read_checkpoint(saved, places=places_in(run.shapes))[1])
            result[saved.name]["resumed"][mesh] = [step["loss"] for step in run.train(state, SAVED, SAVED + 2)[1]]
    if not first:
        return
    one = result["one"]["final"]
    for found in result.values():
        final = found.pop("final")
        # The gradient of a key's bias is zero but for rounding, which Adam makes as large as the others.
        pairs = [
            (a[path], b[path]) for a, b in zip(final, one, strict=True) for path in b if not path.endswith("key/bias")
        ]
        found["difference"] = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    print()  # Gloo has printed on this line
    print(json.dumps(result))


if __name__ == "__main__":
    main()
