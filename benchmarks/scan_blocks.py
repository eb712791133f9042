"""How long a training step of GPT-2 takes to trace and to compile, with its blocks one by one and as one loop.

Both forms are measured alternately in one process, without a cache of compiled programs: for the CPU that is here, and
for a GPU that need not be.

    pip install -e '.[plan]'
    python benchmarks/scan_blocks.py --for cpu h200 --output benchmarks/results/scan_blocks.json
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import jax


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands.plan import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan.compiled import _compiled
from mpjax.plan.devices import GPUS
from mpjax.plan.step import Step
from mpjax.plan.target import mesh_of, traced_for
from mpjax.training.mesh import make_mesh


SETTINGS = (
    "--task language_modeling --data.name docstrings --data.length 64 --data.batch_size 8 --model.name gpt2 "
    "--model.heads 4 --optimizer.name adamw --optimizer.weight_decay 0.1 --optimizer.clip_norm 1"
)
FORMS = {"one by one": "--model.no_scan_blocks", "one loop": "--model.scan_blocks"}


def step_of(form: str, *, width: int, depth: int, policy: str) -> Step:
    sizes = f"--model.width {width} --model.depth {depth} --precision.policy {policy}"
    config = load_config(f"{SETTINGS} {sizes} {FORMS[form]}".split())
    return planned_step(config, fields_of(config, vocabulary=257))


def seconds_of(step: Step, device: str) -> dict[str, float]:
    """Returns the seconds to trace, to lower and to compile, and those of all processors together ("busy")."""
    jax.clear_caches()
    times, busy = [time.perf_counter()], time.process_time()
    if device == "cpu":
        train_step, given = step.on(make_mesh(jax.devices()[:1]))
        traced = train_step.trace(*given)
    else:
        mesh = mesh_of(device, 1)
        with traced_for(GPUS[device], mesh.devices.flat[0], "auto"):
            train_step, given = step.on(mesh)
            traced = train_step.trace(*given)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile() if device == "cpu" else _compiled(lowered, device, {})
    times.append(time.perf_counter())
    trace, lower, compilation = (after - before for before, after in zip(times[:-1], times[1:], strict=True))
    return {
        "trace": trace,
        "lower": lower,
        "compile": compilation,
        "all": times[-1] - times[0],
        "busy": time.process_time() - busy,
    }


def measured(device: str, *, width: int, depth: int, policy: str, repeats: int) -> dict:
    steps = {form: step_of(form, width=width, depth=depth, policy=policy) for form in FORMS}
    seconds_of(step_of("one loop", width=8, depth=2, policy=policy), device)  # what is loaded at the first compilation
    found = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form, step in steps.items():
            found[form].append(seconds_of(step, device))
            print(device, form, {name: round(value, 2) for name, value in found[form][-1].items()}, flush=True)
    medians = {
        form: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for form, runs in found.items()
    }
    before, after = (medians[form] for form in FORMS)
    return {
        "width": width,
        "depth": depth,
        "policy": policy,
        **medians,
        "ratios": {n: after[n] / before[n] for n in after},
    }


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
    results = {device: measured(device, **options) for device in arguments.devices}
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
