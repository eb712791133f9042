"""What statistics of every layer cost in training: the probe of a step beside the step itself, interleaved.

The default task's ResNet-18 on digits, and one of full width at 32x32. With `--diagnosis.every N` a run takes
1 + ratio / N times as long; without it the compiled step is the same.

    python benchmarks/probe.py --output benchmarks/results/probe_cpu.json
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

from mpjax.commands import build_run, fresh_state, layer_probe
from mpjax.config import Config, load_config


TASKS = {
    "resnet18 of width 16 on digits": ["--diagnosis.every", "1"],
    "resnet18 at 32x32": ["--model.width", "64", "--data.name", "synthetic:32x32x3:10", "--diagnosis.every", "1"],
}


def measure(config: Config, repeats: int) -> dict:
    built = build_run(config)
    state = built.packing.pack(fresh_state(built))
    batch = jax.device_put(next(iter(built.batches.from_position(0))), built.batch_sharding)
    start = time.perf_counter()
    probe = layer_probe(built).lower(state, batch, 1).compile()
    compiled = time.perf_counter()
    step = built.train_step.lower(state, batch).compile()
    compile_seconds = compiled - start, time.perf_counter() - compiled
    pairs = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(probe(state, batch))
        between = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        pairs.append((between - start, time.perf_counter() - between))
    probes, steps = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    ratios = sorted(a / b for a, b in pairs[1:])
    return {
        "ratio_of_medians": probes / steps,
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "slower_every_100_steps": probes / steps / 100,
        "sites": len(probe(state, batch).sites),
        "compile_seconds": {"probe": compile_seconds[0], "step": compile_seconds[1]},
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {name: measure(load_config(flags), arguments.repeats) for name, flags in TASKS.items()}
    text = json.dumps({"machine": describe(), "tasks": found}, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
