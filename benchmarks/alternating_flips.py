"""Alternating flips and test-time augmentation: examples/airbench.toml on a part of CIFAR-10, for two CPU cores.

    python benchmarks/alternating_flips.py --data_dir FOLDER --output benchmarks/results/alternating_flips_cpu.json

Each seed is trained with flips at random and in alternation, one after the other, and evaluated with and without views.
Finished runs in the output file are kept, so that it can be stopped and started again.
"""

import argparse
import contextlib
import io
import json
import pathlib
import statistics
import sys
import tempfile


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

import mpjax
from mpjax.commands.evaluate import evaluate_run
from mpjax.config import load_config
from mpjax.config.commands import Evaluation


CONFIG = pathlib.Path(__file__).parents[1] / "examples" / "airbench.toml"
FLAGS = (
    "--data.train_split train[:10%] --data.test_split test[:20%] --data.batch_size 250 --data.eval_batch_size 250 "
    "--data.test_time_augmentation none --model.width 8 --steps 4_epochs --training.steps_per_call 1 "
    "--precision.policy float32 --report.no_plot --report.no_tensorboard"
)
FLIPS = {"random": "--data.no_alternate_flips", "alternating": "--data.alternate_flips"}


def train(flips: str, seed: int, data: str, data_dir: str) -> dict:
    """Trains and evaluates one seed; returns the test accuracy with each kind of views."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = [word.replace("_epochs", " epochs") for word in [*FLAGS.split(), FLIPS[flips]]]
        own = ["--data.name", data, "--data.data_dir", data_dir, "--seed", str(seed), "--output_dir", f"{folder}/run"]
        summary = mpjax.run(load_config(["--config", str(CONFIG), *flags, *own]))
        viewed = {
            views: evaluate_run(Evaluation(run=f"{folder}/run", checkpoint="latest", test_time_augmentation=views))[
                "test/accuracy"
            ]
            for views in ("mirror", "mirror_translate")
        }
    kept = {name: summary[name] for name in ("steps", "skipped", "parameters", "seconds")}
    return {"accuracy": {"none": summary["test/accuracy"], **viewed}, **kept}


def table(results: dict) -> str:
    """The mean over the seeds of each kind of flips and views, with the lowest and the highest."""
    lines = []
    for flips, runs in results.items():
        for views in next(iter(runs.values()))["accuracy"]:
            found = [run["accuracy"][views] for run in runs.values()]
            span = f"{min(found):.4f} to {max(found):.4f}, {len(found)} seeds"
            lines.append(f"{flips:<12} {views:<18} {statistics.mean(found):.4f} ({span})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data_dir", required=True, help="folder of prepared data sets")
    parser.add_argument("--data", default="cifar10_jpeg", help="name of the set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    results: dict = {flips: {} for flips in FLIPS}
    if arguments.output and arguments.output.exists():
        results = json.loads(arguments.output.read_text())["accuracy"]
    for seed in map(str, range(arguments.seeds)):
        for flips in FLIPS:
            if seed not in results[flips]:
                results[flips][seed] = train(flips, int(seed), arguments.data, arguments.data_dir)
                print(flips, seed, results[flips][seed], flush=True)
                if arguments.output:
                    about = {"machine": describe(), "flags": FLAGS, "data": arguments.data, "accuracy": results}
                    arguments.output.write_text(json.dumps(about, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
