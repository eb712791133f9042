"""The trainer's own steps on the GPU at hand, compiled as a run compiles them: times, memory, costliest kernels.

    PYTHONPATH=. python benchmarks/gpu_steps.py --output FILE [--only PREFIX ...]

Beside `benchmarks/gpu.py`, which times the step of a library's user and of peers. Each variant changes one thing. Of
each, the steps are timed one by one (the host waits for every result) and as a run takes them (one after the other,
the last waited for), and three are profiled: kernels are summed by name.
"""

import argparse
import collections
import glob
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan import parse, random_batch, traffic_of
from mpjax.training import initial_state, make_mesh, put_on_devices, trace


GPT2 = (
    "--task language_modeling --data.name docstrings --data.length 1024 --data.batch_size 32 --model.name gpt2 "
    "--optimizer.name adamw --training.label_smoothing 0"
)
VIT = "--config configs/imagenet_vit_s16.toml --model.name vit_b16 --data.batch_size 256"
RESNET = (
    "--data.name imagenet2012 --data.image_size 224 --data.crop_padding 0 --data.batch_size 256 --model.name resnet50 "
    "--model.stem imagenet --model.width 64"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2 bfloat16 50257": {"flags": GPT2, "policy": "mixed_bfloat16", "vocabulary": 50257},
    "gpt2 bfloat16": {"flags": GPT2, "policy": "mixed_bfloat16", "vocabulary": 50304},
    "vit bfloat16": {"flags": VIT, "policy": "mixed_bfloat16"},
    "gpt2 bfloat16, kernel of norms": {
        "flags": f"{GPT2} --model.norm_kernel pallas",
        "policy": "mixed_bfloat16",
        "vocabulary": 50304,
    },
    "vit bfloat16, kernel of norms": {"flags": f"{VIT} --model.norm_kernel pallas", "policy": "mixed_bfloat16"},
    "gpt2 bfloat16, XLA's own options": {
        "flags": GPT2,
        "policy": "mixed_bfloat16",
        "vocabulary": 50304,
        "options": {},
    },
    "vit bfloat16, XLA's own options": {"flags": VIT, "policy": "mixed_bfloat16", "options": {}},
    "resnet bfloat16": {"flags": RESNET, "policy": "mixed_bfloat16"},
    "gpt2 float8": {"flags": GPT2, "policy": "mixed_float8", "vocabulary": 50304},
    "vit float8": {"flags": VIT, "policy": "mixed_float8"},
    "gpt2 float16": {"flags": GPT2, "policy": "mixed_float16", "vocabulary": 50304},
    "gpt2 float16, not scaled": {
        "flags": f"{GPT2} --precision.loss_scale none",
        "policy": "mixed_float16",
        "vocabulary": 50304,
    },
    "resnet float16": {"flags": RESNET, "policy": "mixed_float16"},
    "resnet float16, not scaled": {"flags": f"{RESNET} --precision.loss_scale none", "policy": "mixed_float16"},
    "vit float16": {"flags": VIT, "policy": "mixed_float16"},
    "vit float16, not scaled": {"flags": f"{VIT} --precision.loss_scale none", "policy": "mixed_float16"},
}


class Begun(NamedTuple):
    """A step that is traced and lowered, the options to compile it with, and its arguments."""

    lowered: Any
    options: Mapping[str, Any]
    state: Any
    batch: Any


def begun(variant: Mapping[str, Any]) -> Begun:
    """Makes the state of a variant, and traces its step."""
    config = load_config([*variant["flags"].split(), "--precision.policy", variant["policy"]])
    fields = fields_of(config, vocabulary=variant.get("vocabulary", 0))
    step = planned_step(config, fields)
    mesh = make_mesh(**step.sizes)
    layout, packing, train_step = step.build_on(mesh)
    batch = put_on_devices(random_batch(fields, step.batch_size, 0), layout.batch(size=step.batch_size, accumulate=1))
    state = packing.pack(initial_state(step.task, step.tx, seed=0, ema=False, layout=layout))
    options = variant.get("options", step.compiler_options(mesh))
    return Begun(trace(train_step, state, batch).lower(), options, state, batch)


def measured(compiled: Any, state: Any, batch: Any, steps: int = 20) -> dict[str, Any]:
    """Times and profiles a compiled step. Donates the state."""

    def in_a_row(state: Any, steps: int) -> tuple[Any, Any, float]:
        start = time.perf_counter()
        for _ in range(steps - 1):
            state, _ = compiled(state, batch)
        state, metrics = jax.block_until_ready(compiled(state, batch))
        return state, metrics, (time.perf_counter() - start) / steps

    repeats = [in_a_row(state, 5)]
    for _ in range(3):
        repeats.append(in_a_row(repeats[-1][0], steps))
    alone = [in_a_row(repeats[-1][0], 1)]
    for _ in range(steps):
        alone.append(in_a_row(alone[-1][0], 1))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _, metrics, _ = in_a_row(alone[-1][0], 3)
        kernels = kernels_of(folder, 3)
    moved = traffic_of(parse(compiled.as_text()))
    return {
        "one by one": statistics.median(seconds for _, _, seconds in alone[1:]),
        "in a row": statistics.median(seconds for _, _, seconds in repeats[1:]),
        "in a row, all": [seconds for _, _, seconds in repeats[1:]],
        "on the device": sum(kernel["seconds"] for kernel in kernels),
        "temporary GB": compiled.memory_analysis().temp_size_in_bytes / 1e9,
        "GB moved": moved.bytes / 1e9,
        "kernels": moved.kernels,
        "loss": float(jax.device_get(metrics["loss"])),
        "costliest": kernels[:12],
    }


def kernels_of(folder: str, steps: int) -> list[dict[str, Any]]:
    """Seconds on the device by kernel, of one step, the costliest first."""
    seconds: collections.Counter[tuple[str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    key = (event.name[:120], str(dict(event.stats).get("hlo_op", ""))[:80])
                    seconds[key] += event.duration_ns / 1e9 / steps
                    counts[key] += 1
    return [
        {"kernel": kernel, "op": op, "seconds": total, "times": counts[kernel, op] / steps}
        for (kernel, op), total in seconds.most_common()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON file for the numbers")
    parser.add_argument("--only", nargs="+", default=[""], help="variants whose names begin so")
    parser.add_argument("--minutes", type=float, default=60.0, help="no variant is begun after this time")
    arguments = parser.parse_args()
    start = time.monotonic()
    record: dict[str, Any] = {"machine": describe("jax", "flax", "optax"), "variants": {}}
    for name in (name for name in VARIANTS if name.startswith(tuple(arguments.only))):
        if time.monotonic() - start > 60 * arguments.minutes:
            found: dict[str, Any] = {"error": "left out: the time was over"}
        else:
            found = one(VARIANTS[name])
        record["variants"][name] = found
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        said = {key: value for key, value in found.items() if key not in ("costliest", "in a row, all", "options")}
        print(name, json.dumps(said), flush=True)
        for kernel in found.get("costliest", [])[:8]:
            print(f"   {1e3 * kernel['seconds']:8.3f} ms {kernel['times']:5.1f}x {kernel['kernel'][:70]}")


def one(variant: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles and measures a step; an error is recorded, so that the others go on."""
    begin = time.monotonic()
    try:
        lowered, options, state, batch = begun(variant)
        middle = time.monotonic()
        compiled = lowered.compile(compiler_options=dict(options))
        end = time.monotonic()
        found = measured(compiled, state, batch)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    return {**found, "traced": middle - begin, "compiled": end - middle, "options": dict(options)}


if __name__ == "__main__":
    main()
