"""mpjax beside what one would take instead: Flax linen with DynamicScale, mpx on Equinox, Keras 3 on JAX, PyTorch AMP.

All train the same two models from the same weights on the same batches, and report loss, accuracy and gradient norm.
The first steps are compared first. Each framework runs in a process of its own, and they are timed in turns. Then the
sentences of the acceptance list are put to each.

    pip install -e '.[bench]'
    python benchmarks/peers.py --output benchmarks/results/peers_cpu.json

A framework that is not installed is left out by name. `--tables` prints the tables of results that are there.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import sys


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from peers.report import tables
from peers.speed import measure
from peers.tasks import TASKS
from peers.worker import PROMISES, TRAINING, Worker


NEEDED = {"mpx": "mpx", "Keras": "keras", "PyTorch": "torch", "PyTorch, compiled": "torch"}
"""What must be importable."""

SENTENCES = ("A1", "A2", "A3", "A7", "A10", "A11", "A20")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--tables", type=pathlib.Path, help="print the tables of these results and do nothing else")
    parser.add_argument("--only", nargs="+", default=list(TRAINING), choices=list(TRAINING), metavar="FRAMEWORK")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--skip", choices=("speed", "promises"), help="leave out one of the two")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each repeat, about")
    arguments = parser.parse_args()
    if arguments.tables:
        print(tables(json.loads(arguments.tables.read_text())))
        return

    missing = [name for name in arguments.only if name in NEEDED and not importlib.util.find_spec(NEEDED[name])]
    wanted = PROMISES if arguments.skip == "speed" else TRAINING
    workers = [Worker(name) for name in arguments.only if name in wanted and name not in missing]
    results: dict = {"not_installed": missing, "load_before": os.getloadavg()}
    try:
        versions = [worker.ask("versions") for worker in workers]
        if arguments.skip != "promises":
            results["promises"] = {
                sentence: {worker.name: worker.ask("judge", sentence) for worker in workers if worker.name in PROMISES}
                for sentence in SENTENCES
            }
        if arguments.skip != "speed":
            results["speed"] = measure(workers, arguments.tasks, repeats=arguments.repeats, seconds=arguments.seconds)
    finally:
        for worker in workers:
            worker.close()

    from machine import describe  # only now: it starts JAX

    machine = describe()
    machine["versions"] |= {package: version for each in versions for package, version in each.items()}
    results = {"machine": machine, **results}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
