"""Test accuracy of the default task under each precision policy, over several seeds.

python benchmarks/digits_precision.py --output benchmarks/results/digits_precision_cpu.json
"""

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import statistics
import sys
import tempfile


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

import mpjax


POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")


def train(policy: str, seed: int) -> dict:
    config = mpjax.Config()
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(
            config,
            seed=seed,
            output_dir=f"{folder}/run",
            precision=dataclasses.replace(config.precision, policy=policy),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            summary = mpjax.run(config)
    kept = ("test/accuracy", "test/loss", "steps", "skipped", "seconds", "compile_seconds", "examples_per_second")
    return {"seed": seed, **{name: summary[name] for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    results: dict[str, list[dict]] = {policy: [] for policy in POLICIES}
    for seed in range(arguments.seeds):
        for policy in POLICIES:  # interleaved, so that a busy machine slows all of them alike
            results[policy].append(train(policy, seed))
            print(policy, results[policy][-1], file=sys.stderr, flush=True)
    print("| policy | test accuracy, mean of seeds | lowest | highest | skipped steps |")
    print("| --- | --- | --- | --- | --- |")
    for policy, runs in results.items():
        scores = [100 * run["test/accuracy"] for run in runs]
        skipped = sum(run["skipped"] for run in runs)
        print(f"| {policy} | {statistics.mean(scores):.2f} % | {min(scores):.2f} | {max(scores):.2f} | {skipped} |")
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
