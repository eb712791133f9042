"""What the framework costs per step: mpjax's training step beside a hand-written Flax linen loop of the same model.

Both train in float32 with the same optimizer, donate their state, and report loss, accuracy and gradient norm. The MLP
also takes its steps 50 in a compiled call, from a set that stays on the device, beside one in a call. Runs are
interleaved; the ratio of medians is given, and the quartiles of the ratios of neighbouring runs.

    python benchmarks/overhead.py --output benchmarks/results/overhead_cpu.json
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState as LinenState


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

import mpjax
from mpjax import models
from mpjax.config import Model
from mpjax.data import BatchesInMemory, Shuffled, labelled_images
from mpjax.training import (
    Layout,
    Resident,
    RunObjective,
    classification,
    create_state,
    make_mesh,
    make_train_call,
    take_apart,
)


# --- The hand-written side -------------------------------------------------------------------------------------------


class LinenMLP(nn.Module):
    """As mpjax.models.mlp."""

    width: int
    depth: int
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = x.reshape(x.shape[0], -1)
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.num_classes)(x)


class LinenBlock(nn.Module):
    """As mpjax.models.resnet.BasicBlock."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train: bool):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
        y = nn.relu(norm()(conv(self.width, (3, 3), strides=self.stride)(x)))
        y = norm(scale_init=nn.initializers.zeros_init())(conv(self.width, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.width, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class LinenResNet18(nn.Module):
    """As mpjax.models.resnet.resnet18 with the small stem."""

    width: int
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = True):
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)
        x = nn.relu(norm(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
        for stage in range(4):
            for index in range(2):
                x = LinenBlock(self.width * 2**stage, 2 if stage > 0 and index == 0 else 1)(x, train)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class LinenStateWithStats(LinenState):
    """Flax's TrainState and batch statistics."""

    batch_stats: dict


def hand_written(model: nn.Module, image_shape, tx) -> tuple[Callable, LinenStateWithStats]:
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, *image_shape)))
    state = LinenStateWithStats.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables.get("batch_stats", {})
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        def loss_of(params):
            logits, new = model.apply(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"].astype(jnp.float32) / 255,
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (logits, new.get("batch_stats", {}))

        (loss, (logits, stats)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.global_norm(grads)}
        return state.apply_gradients(grads=grads, batch_stats=stats), metrics

    return step, state


# --- The mpjax side --------------------------------------------------------------------------------------------------


def scaled(batch, key):
    return {**batch, "image": batch["image"].astype(jnp.float32) / 255}


def with_mpjax(config: Model, image_shape, tx) -> tuple[Callable, mpjax.TrainState]:
    model = models.build_model(config, fields=labelled_images(10, image_shape), rngs=nnx.Rngs(0))
    mpjax.apply_policy(model, "float32")
    structure, params, stats = take_apart(model)
    tx = mpjax.no_loss_scaling(tx)
    objective = RunObjective(classification(mpjax.get_policy("float32")), scaled)
    return mpjax.make_train_step(structure, tx, objective.loss), create_state(params, stats, tx)


# --- Several steps in a call ------------------------------------------------------------------------------------------

PER_CALL = 50


def in_calls(step: Callable, state, batches: list) -> tuple[Callable, mpjax.TrainState, list]:
    """`step` in calls of `PER_CALL` on rows of one table; its steps learn from what `batches` hold."""
    table = jax.tree.map(lambda *parts: np.concatenate(parts), *jax.device_get(batches))
    size = len(batches[0]["label"])
    resident = BatchesInMemory(table, Shuffled(size * len(batches), size, seed=0))
    feed = Resident.of(resident, Layout(make_mesh()).batch(size=size))
    call = make_train_call(step, feed.batch)
    feds = feed.calls(0, [PER_CALL] * len(batches))
    return lambda state, fed: call(state, fed, PER_CALL), state, list(feds)


# --- The comparison --------------------------------------------------------------------------------------------------


def seconds_per_step(step: Callable, state, batches: list, steps: int) -> tuple[float, object]:
    start, metrics = time.perf_counter(), None
    for index in range(steps):
        state, metrics = step(state, batches[index % len(batches)])
    jax.block_until_ready((state, metrics))
    return (time.perf_counter() - start) / steps, state


def ratios_of(mine, other, *, steps: int, repeats: int, per_call: int = 1) -> dict:
    """Time per step of `mine` to that of `other`, each (step, state, batches); a call of mine is `per_call` steps."""
    (step_a, state_a, batches_a), (step_b, state_b, batches_b) = mine, other
    _, state_a = seconds_per_step(step_a, state_a, batches_a, 3)
    _, state_b = seconds_per_step(step_b, state_b, batches_b, 3)
    a, b = [], []
    for _ in range(repeats):
        seconds, state_a = seconds_per_step(step_a, state_a, batches_a, steps // per_call)
        a.append(seconds / per_call)
        seconds, state_b = seconds_per_step(step_b, state_b, batches_b, steps)
        b.append(seconds)
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    return {
        "ratio_of_medians": statistics.median(a) / statistics.median(b),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "steps": steps,
        "repeats": repeats,
    }


def compare(mine, hand, batches: list, *, steps: int, repeats: int) -> dict:
    leaves = [len(jax.tree.leaves(state)) for _, state in (mine, hand)]
    ratios = ratios_of((*mine, batches), (*hand, batches), steps=steps, repeats=repeats)
    return {**ratios, "mpjax_leaves": leaves[0], "hand_written_leaves": leaves[1]}


def batches_of(image_shape, batch_size: int) -> list:
    rng = np.random.default_rng(0)
    return [
        jax.device_put(
            {
                "image": rng.integers(0, 256, (batch_size, *image_shape), dtype=np.uint8),
                "label": rng.integers(0, 10, batch_size, dtype=np.int32),
            }
        )
        for _ in range(4)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()

    def tx():
        return optax.sgd(0.01, momentum=0.9, nesterov=True)

    results = {}
    mlp = Model(name="mlp", width=16, depth=8)
    results["mlp 8x8, 9 layers of 16, batch 16"] = compare(
        with_mpjax(mlp, (8, 8, 1), tx()),
        hand_written(LinenMLP(16, 8, 10), (8, 8, 1), tx()),
        batches_of((8, 8, 1), 16),
        steps=500,
        repeats=arguments.repeats,
    )
    single, called = with_mpjax(mlp, (8, 8, 1), tx()), with_mpjax(mlp, (8, 8, 1), tx())
    batches = batches_of((8, 8, 1), 16)
    calls = ratios_of(
        in_calls(*called, batches), (*single, batches), steps=500, repeats=arguments.repeats, per_call=PER_CALL
    )
    resnet = Model(name="resnet18", width=64, stem="small")
    results["resnet18 32x32, batch 32"] = compare(
        with_mpjax(resnet, (32, 32, 3), tx()),
        hand_written(LinenResNet18(64, 10), (32, 32, 3), tx()),
        batches_of((32, 32, 3), 32),
        steps=2,
        repeats=max(3, arguments.repeats // 3),
    )
    for name, result in results.items():
        low, high = result["ratio_quartiles"]
        print(f"{name}: {result['ratio_of_medians']:.3f} of the hand-written step (quartiles {low:.3f} to {high:.3f})")
    low, high = calls["ratio_quartiles"]
    print(f"{PER_CALL} steps in a call: {calls['ratio_of_medians']:.3f} of as many calls ({low:.3f} to {high:.3f})")
    results[f"mlp, {PER_CALL} steps in a call, to as many calls"] = calls
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
