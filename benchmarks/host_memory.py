"""What keeping freed memory is worth on a CPU: commands as they are, and with glibc's defaults, in turn.

python benchmarks/host_memory.py --output benchmarks/results/host_memory_cpu.json
"""

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe


REPOSITORY = pathlib.Path(__file__).parents[1]
RUNS = {
    "README's first run": "",
    "ViT, digits": "--config configs/digits_vit.toml",
    "GPT-2, tiny": "--config configs/tiny_gpt2.toml --steps 60",
    "U-Net, digits": "--config configs/digits_unet.toml --steps 100",
    "BERT, docstrings": "--config configs/docstrings_bert.toml --steps 150",
    "ResNet-18, 32x32": "--data.name synthetic:32x32x3:10 --model.name resnet18 --data.batch_size 128 --steps 20",
}
DEFAULTS = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}  # any setting of glibc.malloc makes mpjax leave memory alone


def one_run(flags: str, environment: dict[str, str]) -> dict[str, float]:
    """Returns examples per second, seconds and page faults of a command, and its largest memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train.py", *shlex.split(flags), "--output_dir", f"{folder}/run"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{shlex.join(command)}: exit status {os.waitstatus_to_exitcode(status)}")
        summary = json.loads(pathlib.Path(folder, "run/summary.json").read_text())
    return {
        "examples_per_second": summary["examples_per_second"],
        "seconds": summary["seconds"],
        "faults": usage.ru_minflt,
        "peak_mb": usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2),
    }


def compare(flags: str, repeats: int) -> dict:
    kept, freed = [], []
    for _ in range(repeats):
        kept.append(one_run(flags, {}))
        freed.append(one_run(flags, DEFAULTS))
    ratios = sorted(
        own["examples_per_second"] / other["examples_per_second"] for own, other in zip(kept, freed, strict=True)
    )
    return {
        "speed": {"median": statistics.median(ratios), "range": [ratios[0], ratios[-1]]},
        "seconds": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(kept, freed, strict=True)),
        "faults": [statistics.median(run["faults"] for run in runs) for runs in (kept, freed)],
        "peak_mb": [statistics.median(run["peak_mb"] for run in runs) for runs in (kept, freed)],
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {name: compare(flags, arguments.repeats) for name, flags in RUNS.items()}
    text = json.dumps({"machine": describe(), "kept_to_glibc_defaults": found}, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
