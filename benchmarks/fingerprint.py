"""Fingerprints of what runs compute: to show that a change of the code changed none of it.

    python benchmarks/fingerprint.py > after.json
    python benchmarks/fingerprint.py --checkout ../before > before.json
    diff before.json after.json

A run's fingerprint is its metrics, each array of its checkpoints (parameters, statistics, moments, loss scale) and the
program of its training step as it is handed to XLA, without source lines. Nothing but the commands and the files that
they leave is used, so that checkouts of any layout can be compared on one machine.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile


HERE = pathlib.Path(__file__).resolve().parent.parent

RUNS = {
    "default": "",
    "ResNet-18": "--data.name synthetic:32x32x3:10 --data.batch_size 8 --precision.policy mixed_bfloat16",
    "ViT": "--config configs/digits_vit.toml --precision.policy float16",
    "GPT-2": "--config configs/tiny_gpt2.toml --data.batch_size 4 --training.accumulate 2 --precision.mode autocast",
}
COMMON = "--steps 3 --optimizer.warmup 1 --loop.log_every 1 --loop.save_every 2 --loop.eval_every 3 --report.no-plot"

NO_TIMES = re.compile("time|second")
"""Metrics that are times."""

READINGS = ("path", "direction", "dtype", "largest", "mean", "overflow", "underflow", "error", "own_error", "histogram")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints fingerprints of what runs compute.")
    parser.add_argument("--checkout", type=pathlib.Path, default=HERE)
    parser.add_argument("--only", choices=RUNS)
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name in [arguments.only] if arguments.only else RUNS:
            print(name, file=sys.stderr)
            found[name] = fingerprint(checkout, RUNS[name], pathlib.Path(folder) / name)
        if "default" in found:
            found["diagnosis"] = diagnosis(checkout, pathlib.Path(folder) / "default" / "run")
    print(json.dumps(found, indent=1))


def fingerprint(checkout: pathlib.Path, flags: str, folder: pathlib.Path) -> dict:
    """Trains three steps; returns what they left."""
    run = folder / "run"
    flags = f"{flags} {COMMON} --output_dir {run} --cache_dir {folder / 'cache'}"
    dump = folder / "programs"
    execute(checkout, "train.py", flags, XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_hlo_as_text")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    abouts = {path.parts[-3]: json.loads(path.read_text()) for path in run.glob("checkpoints/*/about/data.json")}
    programs = sorted(dump.glob("*before_optimizations.txt"))
    return {
        "metrics": [{name: x for name, x in line.items() if not NO_TIMES.search(name)} for line in lines],
        "checkpoints": {step: about["checksums"] for step, about in sorted(abouts.items())},
        "programs": sorted({f"{name_of(path)} {digest(path)}" for path in programs if "train" in name_of(path)}),
    }


def diagnosis(checkout: pathlib.Path, run: pathlib.Path) -> dict:
    """Returns the verdict and all readings of the step after a run's last checkpoint."""
    text = execute(checkout, "diagnose.py", f"--run {run} --json")
    found = json.loads(text[text.index("{") :])
    table = [{name: row[name] for name in READINGS} for row in found["table"]]
    readings = hashlib.sha256(json.dumps(table).encode()).hexdigest()
    return {name: found[name] for name in ("verdict", "path", "rules", "verified")} | {"readings": readings}


def execute(checkout: pathlib.Path, script: str, flags: str, **environment: str) -> str:
    command = [sys.executable, str(checkout / "scripts" / script), *flags.split()]
    environment = {**os.environ, "PYTHONPATH": str(checkout), **environment}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def name_of(path: pathlib.Path) -> str:
    return path.name.split(".")[1]


def digest(path: pathlib.Path) -> str:
    """Returns the checksum of a program without its name, numbers of names, and where in the source it comes from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", path.read_text())
    text = text.partition("\n\n")[2]  # the first line has the module's name and number
    text = re.sub(r"(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", "", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16] + f" of {len(text.splitlines())} lines"


if __name__ == "__main__":
    main()
