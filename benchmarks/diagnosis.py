"""What a diagnosis of ResNet-50 at 224x224, batch 8, takes: seconds, and memory beside that of a float32 step.

Each case is a process of its own. Its memory is the largest that the process had resident while it ran, without what
it had before (the model, the batch, JAX). The float32 step is the compiled one, compiling included.

    python benchmarks/diagnosis.py --output benchmarks/results/diagnosis_cpu.json
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

import mpjax
from mpjax.models import ImageNetStem, ResNet, resnet50


def loss_fn(model: ResNet, batch: dict) -> jax.Array:
    logits = model(batch["image"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def float32_step(model: ResNet, batch: dict) -> dict:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, rest, batch):
        return jax.value_and_grad(lambda params: loss_fn(nnx.merge(graph, params, rest, copy=True), batch))(params)

    jax.block_until_ready(step(params, rest, batch))
    return {}


def healthy(model: ResNet, batch: dict) -> dict:
    return _found(mpjax.diagnose(model, loss_fn, batch, policy="mixed_float16"))


def overflow(model: ResNet, batch: dict) -> dict:
    """A convolution whose results pass float16's largest number; the norm after it takes them back in float32."""
    kernel = model.blocks[7].conv2.kernel
    kernel[...] = kernel[...] * 2.0**17
    return _found(mpjax.diagnose(model, loss_fn, batch, policy="mixed_float16"))


def gradients_lost(model: ResNet, batch: dict) -> dict:
    """A loss so small that its gradients become zero in float16: what is wanting is a loss scale."""
    return _found(mpjax.diagnose(model, lambda *args: loss_fn(*args) * 2.0**-20, batch, policy="mixed_float16"))


CASES = {case.__name__: case for case in (float32_step, healthy, overflow, gradients_lost)}


def _found(diagnosis: mpjax.Diagnosis) -> dict:
    fields = {name: getattr(diagnosis, name) for name in ("verdict", "path", "rules", "better_scale", "verified")}
    return {name: dict(value) if name == "rules" else value for name, value in fields.items()}


def resident(what: str) -> float:
    """Gigabytes of this process: VmRSS now, VmHWM at most since the last reset."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what)) * 1024 / 1e9


def measure(name: str) -> dict:
    """One case, in this process."""
    model = resnet50(ImageNetStem, channels=3, width=64, num_classes=1000, rngs=nnx.Rngs(0))
    batch = {"image": jax.random.normal(jax.random.key(0), (8, 224, 224, 3)), "label": jnp.arange(8)}
    jax.block_until_ready((nnx.state(model), batch))
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the largest is that from here on
    start, busy = time.perf_counter(), time.process_time()
    found = CASES[name](model, batch)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - busy,
        "gigabytes": resident("VmHWM") - before,
        "gigabytes_before": before,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", choices=list(CASES), help="only this case, in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    results = {}
    for name in arguments.cases:
        load = os.getloadavg()[0]
        command = [sys.executable, __file__, "--one", name]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        results[name] = {**result, "load_before": load}
        print(name, json.dumps(results[name]), flush=True)
    step = results.get("float32_step")
    for name, result in results.items():
        if step and name != "float32_step":
            whole = [r["gigabytes"] + r["gigabytes_before"] for r in (result, step)]
            result["memory_of_a_float32_step"] = result["gigabytes"] / step["gigabytes"]
            result["memory_of_a_float32_process"] = whole[0] / whole[1]
            print(f"{name}: {result['seconds']:.0f} s, {result['memory_of_a_float32_step']:.2f} times a float32 step")
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
