"""mpjax on one GPU beside its peers: how fast, in how much memory, and how near the device's limits.

    python benchmarks/gpu.py                    every network, nine minutes at most; results in benchmarks/results
    python benchmarks/gpu.py --only vit_b16 gpt2 --output FILE
    python benchmarks/gpu.py --table FILE ...   the table of results for docs/measured.md
    python benchmarks/gpu.py --smoke            everything at tiny sizes, on whatever device there is

ResNet-50 and ResNet-18, a GPT-2 small, ViT-B/16 and a U-Net are trained on random inputs that stay on the device, in
float32 (its products in TF32), mixed_bfloat16 and mixed_float16 with and without loss scaling; beside PyTorch AMP
(channels last, torch.compile, a fused optimizer) where it is installed and sees the GPU, and beside a loop in Flax
linen with DynamicScale, for ResNets. A row is timed only if its first loss, gradient norm and update agree with those
in float32. All rows of a network take turns, each peer in a process of its own; what is not reached in time is listed
as left out, and a second run with the same --cache finds the compiled programs again.

It needs jax with CUDA, flax, optax and jmp, and takes torch and timm where they are; no other dependency of mpjax. On a
machine that cannot install: fetch the wheel of what is missing where a network is (`pip download --no-deps jmp`), take
it along with this repository, and there `pip install --no-deps jmp-*.whl`, then from the root of the repository
`PYTHONPATH=. python benchmarks/gpu.py --minutes 9 --output FILE`.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from gpu.cases import CASES, SMALL
from gpu.results import Results
from gpu.schedule import Budget, Schedule
from gpu.table import table
from gpu.worker import Settings


RESULTS = pathlib.Path(__file__).parent / "results"


def main() -> None:
    arguments = parse()
    if arguments.table:
        print("\n".join(table(json.loads(path.read_text())) for path in arguments.table), end="")
        return
    results = Results(arguments.output, say=lambda line: print(line, flush=True))
    results.header |= {"driver": driver(), "minutes": arguments.minutes, "small": arguments.smoke}

    def begin(found: dict) -> None:
        """A CPU would need hours, and its numbers are no GPU's."""
        if found["platform"] == "cpu" and not arguments.smoke:
            sys.exit("JAX sees no GPU here, only a CPU; --smoke runs everything at tiny sizes")
        if results.path is None and not arguments.smoke:
            results.path = RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', found['device'].lower()).strip('_')}.json"

    schedule = Schedule(
        results,
        Budget(60 * arguments.minutes),
        Settings(small=arguments.smoke, cache=str(arguments.cache)),
        rounds=2 if arguments.smoke else 9,
        seconds=0.0 if arguments.smoke else 0.3,
    )
    cases = SMALL if arguments.smoke else CASES
    schedule.run([case for case in cases if case.name in arguments.only], begin)
    print(table(results.concluded()), end="")


def parse() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="the time limit of the whole run")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these networks alone")
    parser.add_argument("--output", type=pathlib.Path, help="results as JSON; by default named after the GPU")
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        default=pathlib.Path(tempfile.gettempdir()) / "mpjax_gpu",
        help="folder of compiled programs",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a step each, on any device")
    parser.add_argument("--table", nargs="+", type=pathlib.Path, help="print the table of these results and stop")
    return parser.parse_args()


def driver() -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.splitlines()[0].strip()


if __name__ == "__main__":
    main()
