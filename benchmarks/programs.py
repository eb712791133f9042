"""What each edit of mpjax's steps for GPUs is worth: the step compiled for an H200 with it and without it.

A GPU is not needed. Each edit is undone alone, so the differences need not add up.

    python scripts/plan.py --install
    python benchmarks/programs.py --output benchmarks/results/programs_h200.json
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import pathlib
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.models import called
from mpjax.plan import PlannedStep, parse, start, traffic_of
from mpjax.training import UNPACKED, Packing, with_labels


GPU = "h200"

STEPS = {
    "ResNet-50": "--data.name imagenet2012 --data.image_size 224 --data.crop_padding 0 --data.batch_size 256 "
    "--model.name resnet50 --model.stem imagenet --model.width 64 --precision.policy mixed_bfloat16",
    "ResNet-50, float16": "--data.name imagenet2012 --data.image_size 224 --data.crop_padding 0 --data.batch_size 256 "
    "--model.name resnet50 --model.stem imagenet --model.width 64 --precision.policy mixed_float16",
    "ResNet-50, float16, not scaled": "--data.name imagenet2012 --data.image_size 224 --data.crop_padding 0 "
    "--data.batch_size 256 --model.name resnet50 --model.stem imagenet --model.width 64 "
    "--precision.policy mixed_float16 --precision.loss_scale none",
    "ViT-B/16": "--config configs/imagenet_vit_s16.toml --model.name vit_b16 --data.batch_size 256 "
    "--precision.policy mixed_bfloat16",
    "GPT-2 small": "--task language_modeling --data.name docstrings --data.length 1024 --data.batch_size 32 "
    "--model.name gpt2 --optimizer.name adamw --training.label_smoothing 0 --precision.policy mixed_bfloat16",
}
VOCABULARY = {"GPT-2 small": 50257}


def _flax_pool(x, window, stride, padding=((0, 0), (0, 0))):
    return nnx.max_pool(x, (window, window), (stride, stride), padding)


def _gathering(smoothing: float, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = logits.astype(jnp.float32)
    hits = jnp.argmax(logits, axis=-1) == labels
    if not smoothing:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels), hits
    target = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32), smoothing)
    return optax.softmax_cross_entropy(logits, target), hits


def _argmax(smoothing: float, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return with_labels(smoothing, logits, labels)[0], jnp.argmax(logits, axis=-1) == labels


def _tanh_slope(x: jax.Array) -> jax.Array:
    width, cube = math.sqrt(2 / math.pi), 0.044715
    bend = jnp.tanh(width * (x + cube * x**3))
    return 0.5 * (1 + bend) + 0.5 * x * (1 - bend**2) * width * (1 + 3 * cube * x**2)


def _each_finite(tree) -> jax.Array:
    finite = jnp.asarray(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.isfinite(leaf).all()
    return finite


def _unpacked(*_, **__) -> Packing:
    return UNPACKED


def _same(x, *_):
    return x


DTYPES = {
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16 --precision.loss_scale none",
    "float16, scaled": "mixed_float16",
    "float8": "mixed_float8",
}
"""The policies of the table of dtypes; a ResNet has no product that may be in float8."""

Patches = dict[str, Any]
EDITS: dict[str, tuple[tuple[str, ...], Patches]] = {
    "batch norm with its own derivative": (
        ("ResNet-50",),
        {"mpjax.models.batch_norm.BatchNorm._is_plain": lambda self, x: False},
    ),
    "ReLU's gradient from its result": (
        ("ResNet-50",),
        {"mpjax.models.resnet.relu": nnx.relu, "mpjax.models.batch_norm.relu": nnx.relu},
    ),
    "ReLU inside of large batch norms": (("ResNet-50",), {"mpjax.models.batch_norm.LARGE": 2**62}),
    "gradients of convolutions laid out as parameters": (
        ("ResNet-50",),
        {"mpjax.training.batch_shards.row_major": _same, "mpjax.training.memory_layout.row_major": _same},
    ),
    "max-pooling's gradient without a scatter": (("ResNet-50",), {"mpjax.models.resnet.max_pool": _flax_pool}),
    "two sums of a batch norm with one second stage": (("ResNet-50",), {"mpjax.models.batch_norm.MANY": 2**62}),
    "one sum to check, measure and clip": (
        ("ResNet-50, float16",),
        {"mpjax.precision.skip_step.all_finite": _each_finite},
    ),
    "one kernel to finish the sums of all gradients": (
        ("ResNet-50", "ResNet-50, float16", "ViT-B/16", "GPT-2 small"),
        {"mpjax.training.batch_shards.added_together": contextlib.nullcontext},
    ),
    "vectors of the state in one array": (
        ("ResNet-50", "ResNet-50, float16", "ViT-B/16", "GPT-2 small"),
        {"mpjax.commands.learner.Packing.of": _unpacked},
    ),
    "small matrices in one array, arrays of 2^16 elements, the bias behind an MLP cast apart": (
        ("ViT-B/16", "GPT-2 small"),
        {
            "mpjax.training.packing.SMALL": -1,
            "mpjax.training.packing.MOST": 2**62,
            "mpjax.models.transformer.with_cast_bias": _same,
            "mpjax.models.attention.with_cast_bias": _same,
        },
    ),
    "the bias behind an MLP cast apart": (
        ("ViT-B/16", "GPT-2 small"),
        {"mpjax.models.transformer.with_cast_bias": _same},
    ),
    "layout after positions": (
        ("ViT-B/16", "GPT-2 small"),
        {"mpjax.models.transformer.with_layout_constraint": _same},
    ),
    "accuracy in the passes of the loss": (("GPT-2 small",), {"mpjax.training.objectives.with_labels": _argmax}),
    "cross entropy without a gather": (("GPT-2 small",), {"mpjax.training.objectives.with_labels": _gathering}),
    "query, key and value as one": (("ViT-B/16", "GPT-2 small"), {"mpjax.models.attention.project": called}),
    "the product kept before GELU": (
        ("ViT-B/16", "GPT-2 small"),
        {"mpjax.models.activations.only_sums": lambda layer: False},
    ),
    "no barrier in GELU's gradient": (
        ("ViT-B/16", "GPT-2 small"),
        {"mpjax.models.activations._recomputed": jax.checkpoint},
    ),
    "GELU's slope without tanh": (("GPT-2 small",), {"mpjax.models.activations._tanh_gelu_slope": _tanh_slope}),
    "casts as written": (("ViT-B/16", "GPT-2 small"), {}),
}
"""The steps that an edit changes, and what undoes it; casts as written are undone by an option of XLA."""


@contextlib.contextmanager
def without(patches: Patches) -> Iterator[None]:
    """Undoes edits while a step is traced."""
    with contextlib.ExitStack() as stack:
        for target, replacement in patches.items():
            stack.enter_context(unittest.mock.patch(target, replacement))
        yield


def step_of(name: str, policy: str = "") -> PlannedStep:
    flags = f"{STEPS[name]} --precision.policy {policy}" if policy else STEPS[name]
    config = load_config(flags.split())
    return planned_step(config, fields_of(config, vocabulary=VOCABULARY.get(name, 0)))


def measure(name: str, change: Callable[[PlannedStep], PlannedStep] = _same, policy: str = "") -> dict[str, Any]:
    """Compiles a step and counts its bytes, temporary memory and kernels."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        program = start(pool, change(step_of(name, policy)), GPU).result()
    traffic = traffic_of(parse(program.executable.as_text()))
    return {
        "GB moved": round(traffic.bytes / 1e9, 2),
        "temporary GB": round(program.memory.temporary / 1e9, 2),
        "kernels": traffic.kernels,
        "of them small": traffic.small,
    }


def of_dtypes() -> dict[str, dict[str, dict[str, Any]]]:
    """Measures the steps of three models with each policy of `DTYPES`."""
    models = {"ResNet-50": list(DTYPES)[:3], "ViT-B/16": list(DTYPES), "GPT-2 small": list(DTYPES)}
    return {
        model: {dtype: measure(model, policy=DTYPES[dtype]) for dtype in dtypes} for model, dtypes in models.items()
    }


def rounded(step: PlannedStep) -> PlannedStep:
    """Returns the step compiled as XLA would by default, which leaves out a cast down before a cast up."""
    return dataclasses.replace(step, xla="xla_allow_excess_precision=true")


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Formats the measurements as a table in Markdown."""
    columns = ("GB moved", "temporary GB", "kernels", "of them small")
    lines = [f"| step | without | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for step, rows in found.items():
        for edit, row in rows.items():
            lines.append(f"| {step} | {edit} | {' | '.join(str(row[column]) for column in columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the numbers")
    parser.add_argument("--dtypes", action="store_true", help="compare dtypes instead of edits")
    arguments = parser.parse_args()
    if arguments.dtypes:
        print(table(of_dtypes()))
        return
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in STEPS:
        edits = {edit: patches for edit, (steps, patches) in EDITS.items() if name in steps}
        found[name] = {"nothing: as it is": measure(name)}
        for edit, patches in edits.items():
            with without(patches):
                found[name][edit] = measure(name, _same if patches else rounded)
        every = {target: new for patches in edits.values() for target, new in patches.items()}
        with without(every):
            found[name]["all of these"] = measure(name, rounded if "casts as written" in edits else _same)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    if arguments.output:
        record = {"machine": describe("jax", "flax", "optax"), "gpu": GPU, "steps": found}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
