"""Seconds from the command to the first step of the default run: with empty caches, and with full ones.

python benchmarks/startup.py --output benchmarks/results/startup_cpu.json
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe


ROOT = pathlib.Path(__file__).parent.parent


def seconds_to_first_step(cache: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "scripts/train.py", "--output_dir", f"{folder}/run", "--loop.log_every", "1"]
        start = time.perf_counter()
        environment = {**os.environ, "MPJAX_CACHE": cache}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step"):
                    seconds = time.perf_counter() - start
                    process.kill()
                    return seconds
    raise RuntimeError("the run ended before its first step")


def seconds_of_help() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, ROOT / "scripts/train.py", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cold, warm = [], []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds_to_first_step(cache))
            warm.append(seconds_to_first_step(cache))
    results = {
        "cold_seconds": statistics.median(cold),
        "warm_seconds": statistics.median(warm),
        "help_seconds": statistics.median(seconds_of_help() for _ in range(arguments.repeats)),
        "repeats": arguments.repeats,
    }
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
