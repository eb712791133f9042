"""How long a checkpoint holds up the steps of a run, beside the same steps without one, interleaved in one run.

A step of some products on all devices, and a state of the given size that it does not touch. A checkpoint starts after
the first of the steps of every second block; the rest of the block trains while it is written in the background.

    python benchmarks/checkpoint_stall.py --megabytes 200 --output benchmarks/results/checkpoint_stall.json
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.loop import Checkpoints


WIDTH = 1024


def blocks_of(checkpoints: Checkpoints, state: dict, steps: int, count: int) -> tuple[dict, dict]:
    """Seconds of blocks of `steps` steps with and without a checkpoint, and of `save` itself and the step behind it."""

    @jax.jit
    def step(x):
        return jnp.tanh(x @ x) + 1e-3

    x = jax.block_until_ready(step(jnp.eye(WIDTH)))
    blocks: dict[bool, list[float]] = {True: [], False: []}
    held: dict[str, list[float]] = {"save": [], "next_step": [], "step": []}
    for number in range(2 * count + 2):  # the first of each kind warms up
        saving, began = number % 2 == 1, time.perf_counter()
        for position in range(steps):
            before = time.perf_counter()
            x = jax.block_until_ready(step(x))
            if number > 1:
                held["next_step" if saving and position == 1 else "step"].append(time.perf_counter() - before)
            if saving and position == 0:
                before = time.perf_counter()
                checkpoints.save(number, state, {}, score=None)
                held["save"] += [time.perf_counter() - before] * (number > 1)
        if number > 1:
            blocks[saving].append(time.perf_counter() - began)
    return {"with": blocks[True], "without": blocks[False]}, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100, help="steps of a block, which has at most one checkpoint")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    state = {str(i): jnp.full((2**18,), i, jnp.float32) for i in range(arguments.megabytes)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(pathlib.Path(folder) / "checkpoints", keep=1)
        blocks, held = blocks_of(checkpoints, state, arguments.steps, arguments.blocks)
        checkpoints.close()
    median = {name: statistics.median(seconds) for name, seconds in (blocks | held).items()}
    result = {
        "megabytes": arguments.megabytes,
        "steps": arguments.steps,
        "block_with_over_without": median["with"] / median["without"],
        "save_over_step": median["save"] / median["step"],
        "next_step_over_step": median["next_step"] / median["step"],
        "seconds": median,
        "machine": describe(),
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
