"""mpjax's training steps beside those of Flax linen and Keras, all compiled by one XLA for an H200.

A GPU is not needed. mpjax's step is that of a run, as in gpu.py; the others are what a user has: a linen loop written
by hand with cuDNN's attention, Keras' own ResNet-50 and Transformers of its layers. Networks, batches and
optimizers are those of gpu.py. Bytes, kernels and expected time are read from the compiled programs, as in plan.py.

    pip install -e '.[plan,bench]'
    python scripts/plan.py --install
    python benchmarks/programs_of_peers.py --output benchmarks/results/programs_of_peers_h200.json
"""

import argparse
import importlib
import json
import pathlib
import sys
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from gpu.cases import CASES, SMALL, Case, Row
from machine import describe

from mpjax.plan import GPUS, bounds_of, compiled_for, expected_seconds, mesh_of, parse, traced_for, traffic_of
from mpjax.precision.casting import flops_of
from mpjax.training import compiler_options


GPU = "h200"
PEERS = {"mpjax": "gpu.with_mpjax", "Flax linen": "gpu.with_linen", "Keras": "gpu.with_keras"}
NETWORKS = ("resnet50", "vit_b16", "gpt2")


def measure(peer: str, case: Case, policy: Any) -> dict[str, Any]:
    """Compiles the step of a peer with the XLA options that it sets on a GPU, and reads its program."""
    mesh = mesh_of(GPU, 1)
    # The values of the peer do not matter here, so all are written as mpjax's row.
    written = importlib.import_module(PEERS[peer]).written(case, Row(peer="mpjax", policy=policy))
    alone = SingleDeviceSharding(mesh.devices.flat[0])
    state, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), written.abstract())
    with traced_for(GPUS[GPU], mesh.devices.flat[0], "auto"):
        traced = written.step.trace(state, batch)
        lowered = traced.lower()
    program = compiled_for(lowered, GPU, compiler_options(mesh) if peer == "mpjax" else {})
    traffic = traffic_of(parse(program.as_text()))
    seconds = expected_seconds(bounds_of(GPUS[GPU], flops_of(traced.jaxpr), traffic.bytes), traffic.kernels)
    return {
        "GB moved": traffic.bytes / 1e9,
        "temporary GB": program.memory_analysis().temp_size_in_bytes / 1e9,
        "kernels": traffic.kernels,
        "expected ms": seconds * 1e3,
    }


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Formats the measurements as a table in Markdown, with mpjax's bytes and time relative to each peer's."""
    columns = ("GB moved", "temporary GB", "kernels", "expected ms")
    titles = ("step", "by", *columns, "mpjax's bytes to these", "time")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for step, rows in found.items():
        for peer, row in rows.items():
            numbers = f"{row['GB moved']:.1f} | {row['temporary GB']:.1f} | {row['kernels']} | {row['expected ms']:.1f}"
            ratios = [f"{rows['mpjax'][name] / row[name]:.2f}" for name in ("GB moved", "expected ms")]
            lines.append(f"| {step} | {peer} | {numbers} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the numbers")
    parser.add_argument("--policy", default="mixed_bfloat16", choices=("mixed_bfloat16", "mixed_float16", "float32"))
    parser.add_argument("--only", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--small", action="store_true", help="small networks, to try the script")
    arguments = parser.parse_args()
    cases = {case.name: case for case in (SMALL if arguments.small else CASES)}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in arguments.only:
        rows = found.setdefault(f"{cases[name]}, {arguments.policy}", {})
        for peer in PEERS:
            rows[peer] = measure(peer, cases[name], arguments.policy)
            print(name, peer, json.dumps(rows[peer]), file=sys.stderr, flush=True)
    if arguments.output:
        record = {"machine": describe("jax", "flax", "optax", "keras"), "gpu": GPU, "steps": found}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
