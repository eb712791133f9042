"""The trainer's own steps on the GPU at hand, with the options that a run compiles with: times, memory, costliest kernels.

    PYTHONPATH=. python benchmarks/gpu_steps.py --output FILE [--only PREFIX ...]

Beside `benchmarks/gpu.py`, which times the step of a library's user and of peers. Each variant changes one thing. Of
each, the steps are timed one by one (the host waits for every result) and as a run takes them (one after the other,
the last waited for), and three are profiled: kernels are summed by name.
"""

import argparse
import collections
import concurrent.futures
import glob
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands.plan import fields_of, planned_step
from mpjax.config import load_config
from mpjax.data import Fields
from mpjax.plan.compiled import PlannedStep
from mpjax.plan.hlo import parse
from mpjax.plan.measure import random_batch, times_of
from mpjax.plan.traffic import traffic_of
from mpjax.training.escaped import trace
from mpjax.training.mesh import make_mesh, place
from mpjax.training.setup import initial_state


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


def begun(variant: dict[str, Any]) -> tuple[PlannedStep, Fields, Any, Any, Any, dict[str, Any]]:
    """Traces and lowers a step."""
    config = load_config([*variant["flags"].split(), "--precision.policy", variant["policy"], *variant.get("more", [])])
    fields = fields_of(config, vocabulary=variant.get("vocabulary", 0))
    step = planned_step(config, fields)
    mesh = make_mesh(**step.sizes)
    layout, packing, train_step = step.place(mesh)
    batch = place(random_batch(fields, step.batch_size, 0), layout.batch(size=step.batch_size, accumulate=1))
    state = packing.pack(initial_state(step.task, step.tx, seed=0, ema=False, layout=layout))
    options = variant.get("options", step.compiler_options(mesh))
    return step, fields, trace(train_step, state, batch).lower(), state, batch, options


def measured(compiled: Any, state: Any, batch: Any, steps: int = 20) -> tuple[dict[str, Any], Any]:
    """Times and profiles a compiled step."""
    holder = [state]

    def once(state: Any) -> Any:
        holder[0], metrics = compiled(state, batch)
        return holder[0], metrics

    one_by_one = times_of(lambda both: once(both[0]), (state, None), repeats=steps)
    in_a_row = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            metrics = once(holder[0])[1]
        jax.block_until_ready((holder[0], metrics))
        in_a_row.append((time.perf_counter() - start) / steps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(3):
                metrics = once(holder[0])[1]
            jax.block_until_ready((holder[0], metrics))
        kernels = kernels_of(folder, 3)
    memory = compiled.memory_analysis()
    moved = traffic_of(parse(compiled.as_text()))
    return {
        "one by one": statistics.median(one_by_one),
        "in a row": statistics.median(in_a_row),
        "in a row, all": in_a_row,
        "on the device": sum(kernel["seconds"] for kernel in kernels),
        "temporary GB": memory.temp_size_in_bytes / 1e9,
        "GB moved": moved.bytes / 1e9,
        "kernels": moved.kernels,
        "loss": float(jax.device_get(metrics["loss"])) if "loss" in metrics else None,
        "costliest": kernels[:60],
    }, holder[0]


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
                    stats = dict(event.stats)
                    key = (event.name[:120], str(stats.get("hlo_op", stats.get("name", "")))[:80])
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
    names = [name for name in VARIANTS if name.startswith(tuple(arguments.only))]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for name in names:
            if time.monotonic() - start > 60 * arguments.minutes:
                record["variants"][name] = {"error": "left out: the time was over"}
                continue
            begin = time.monotonic()
            try:
                *_, lowered, state, batch, options = begun(VARIANTS[name])
                middle = time.monotonic()
                compiled = pool.submit(lowered.compile, compiler_options=options).result()
                end = time.monotonic()
                found, _ = measured(compiled, state, batch)
                found |= {"traced": middle - begin, "compiled": end - middle, "options": {**options}}
            except Exception as error:  # the others go on
                found = {"error": f"{type(error).__name__}: {error}"[:600]}
            state = batch = compiled = lowered = _ = None
            record["variants"][name] = found
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
            said = {key: value for key, value in found.items() if key not in ("costliest", "in a row, all", "options")}
            print(name, json.dumps(said), flush=True)
            for kernel in found.get("costliest", [])[:8]:
                print(f"   {1e3 * kernel['seconds']:8.3f} ms {kernel['times']:5.1f}x {kernel['kernel'][:70]} {kernel['op'][:40]}")


if __name__ == "__main__":
    main()
