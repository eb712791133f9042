"""How long a training step of GPT-2 takes to trace and to compile, with its blocks one by one and as one loop.

Both forms are measured alternately in one process, without a cache of compiled programs, with AdamW, without and with
clipping of gradients: for the CPU that is here, and for a GPU that need not be.

    python scripts/plan.py --install
    python benchmarks/scan_blocks.py --for cpu h200 --output benchmarks/results/scan_blocks.json
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan import PlannedStep, start
from mpjax.training import make_mesh


SETTINGS = (
    "--task language_modeling --data.name docstrings --data.length 64 --data.batch_size 8 --model.name gpt2 "
    "--model.heads 4 --optimizer.name adamw --optimizer.weight_decay 0.1"
)
_POOL = concurrent.futures.ThreadPoolExecutor(1)
FORMS = {"one by one": "--model.no_scan_blocks", "one loop": "--model.scan_blocks"}


def step_of(form: str, *, width: int, depth: int, policy: str, clip_norm: float) -> PlannedStep:
    sizes = f"--model.width {width} --model.depth {depth} --precision.policy {policy} --optimizer.clip_norm {clip_norm}"
    config = load_config(f"{SETTINGS} {sizes} {FORMS[form]}".split())
    return planned_step(config, fields_of(config, vocabulary=257))


def seconds_of(step: PlannedStep, device: str) -> dict[str, float]:
    """Returns the seconds to trace and lower, to compile, both, and both of all processors together ("processors")."""
    jax.clear_caches()
    began, busy = time.perf_counter(), time.process_time()
    if device == "cpu":
        train_step, given = step.on(make_mesh(jax.devices()[:1]))
        finish = train_step.lower(*given).compile
    else:
        finish = start(_POOL, step, device).result  # pyright: ignore[reportArgumentType]
    lowered = time.perf_counter()
    finish()
    ended = time.perf_counter()
    return {
        "trace": lowered - began,
        "compile": ended - lowered,
        "both": ended - began,
        "processors": time.process_time() - busy,
    }


def measured(device: str, *, repeats: int, **settings: Any) -> dict:
    steps = {form: step_of(form, **settings) for form in FORMS}
    seconds_of(step_of("one loop", **{**settings, "depth": 2}), device)  # what is loaded at the first compilation
    found = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form, step in steps.items():
            found[form].append(seconds_of(step, device))
            print(device, form, {name: round(value, 2) for name, value in found[form][-1].items()}, flush=True)
    medians = {
        form: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for form, runs in found.items()
    }
    before, after = (medians[form] for form in FORMS)
    return {**settings, **medians, "ratios": {name: after[name] / before[name] for name in after}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--for", dest="devices", nargs="+", default=["cpu"], help="cpu, or GPUs as plan.py names them")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    options = {name: getattr(arguments, name) for name in ("width", "depth", "policy", "repeats")}
    results = {
        device: [measured(device, clip_norm=clip_norm, **options) for clip_norm in (0.0, 1.0)]
        for device in arguments.devices
    }
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
