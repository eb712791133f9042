"""Seconds from the command to the first step of the default run: with empty caches, and with full ones.

With --answers only: seconds of processor time until `mpjax` and the help of each command have answered.

python benchmarks/startup.py --output benchmarks/results/startup_cpu.json
"""

import argparse
import json
import os
import pathlib
import resource
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


ANSWERS = {
    "python -c pass": ["-c", "pass"],
    "mpjax": ["-c", "import sys; from mpjax.cli import main; sys.exit(main())"],
    **{
        f"{name} --help": [str(ROOT / "scripts" / f"{name}.py"), "--help"]
        for name in ("train", "evaluate", "predict", "diagnose", "plan", "find_lr", "compare", "export", "train_ray")
    },
}


def seconds_of_answers(repeats: int) -> dict[str, float]:
    """Returns the least processor time of each, measured in turns: what an idle machine takes by the clock."""
    times: dict[str, list[float]] = {name: [] for name in ANSWERS}
    for _ in range(repeats):
        for name, arguments in ANSWERS.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--answers", action="store_true", help="measure only how long commands take to answer")
    arguments = parser.parse_args()
    if arguments.answers:
        print(json.dumps(seconds_of_answers(arguments.repeats), indent=2))
        return
    cold, warm = [], []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds_to_first_step(cache))
            warm.append(seconds_to_first_step(cache))
    results = {
        "cold_seconds": statistics.median(cold),
        "warm_seconds": statistics.median(warm),
        "answer_seconds": seconds_of_answers(arguments.repeats),
        "repeats": arguments.repeats,
    }
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
