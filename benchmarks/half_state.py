"""What the training state of GPT-2 small takes, and what its update moves, by how weights and moments are stored.

The step is compiled for an H200, which need not be there:

    python scripts/plan.py --install
    python benchmarks/half_state.py --output benchmarks/results/half_state_h200.json
"""

import argparse
import contextlib
import io
import json
import pathlib
import sys


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands import plan_run
from mpjax.config import Plan, load_config


GPU = "h200"
CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "gpt2_small.toml"
WITHOUT = "--precision.policy bfloat16 --precision.master_weights"
STATES = {
    "float32 weights": "--precision.policy mixed_bfloat16",
    "bfloat16 weights, float32 copies": "--precision.policy bfloat16",
    "bfloat16 weights with a compensation": f"{WITHOUT} kahan",
    "bfloat16 weights, rounded stochastically": f"{WITHOUT} stochastic",
    "the same, moments in bfloat16": f"{WITHOUT} stochastic --optimizer.moments bfloat16",
    "the same, first moments in float8": f"{WITHOUT} stochastic --optimizer.moments float8",
}


def measure(flags: str) -> dict[str, float]:
    settings = Plan(gpu=(GPU,), fit=False, receipt=True, vocabulary=50257, costliest=0, measure=False, json=True)
    with contextlib.redirect_stdout(io.StringIO()):
        (plan,) = plan_run(settings, load_config(["--config", str(CONFIG), *flags.split()]))["plans"]
    memory = plan["memory"]
    return {
        "weights MB": memory["parameters"] / 1e6,
        "optimizer MB": memory["optimizer"] / 1e6,
        "state MB": (memory["parameters"] + memory["optimizer"]) / 1e6,
        "peak MB": memory["total"] / 1e6,
        "update moves MB": plan["receipt"]["update_bytes"] / 1e6,
    }


def table(found: dict[str, dict[str, float]]) -> str:
    """Formats the measurements as a table in Markdown."""
    columns = list(next(iter(found.values())))
    lines = [f"| stored | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(f'{row[c]:,.0f}' for c in columns)} |" for name, row in found.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    found = {}
    for name, flags in STATES.items():
        found[name] = measure(flags)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    if arguments.output:
        record = {**describe(), "gpu": GPU, "states": found}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
