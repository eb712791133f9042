"""What every model learns on real data, at a size for two CPU cores, under each policy and over several seeds.

Image models learn the digits, the U-Net the digits composed on a canvas, BERT which module of Python's standard library
a documentation string is from, and GPT-2 to continue such strings. A model holds its score in half precision if the
means differ by no more than seeds do.

    python benchmarks/models_precision.py --output benchmarks/results/models_precision_cpu.json
    python benchmarks/models_precision.py --tasks resnet18 --policies float32 float16
    python benchmarks/models_precision.py --tasks vit bert gpt2 --policies mixed_bfloat16 mixed_float8 \
        --output benchmarks/results/models_float8_cpu.json
    python benchmarks/models_precision.py --tasks vit bert gpt2 --policies bfloat16 \
        "bfloat16 --precision.master_weights stochastic" "bfloat16 --precision.master_weights kahan" \
        "bfloat16 --precision.master_weights stochastic --optimizer.moments bfloat16" \
        "bfloat16 --precision.master_weights stochastic --optimizer.moments float8" \
        --output benchmarks/results/models_half_state_cpu.json

A policy may be followed by further flags. Finished runs in the output file are kept, so that it can be stopped and
started again.
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
from mpjax.config import TASKS, load_config
from mpjax.report import read_metrics


POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
ADAMW = "--optimizer.name adamw --optimizer.learning_rate 3e-3 --optimizer.weight_decay 0.05 --optimizer.clip_norm 1"

FLAGS = {
    "resnet18": "",
    "resnext50": f"--model.name resnext50 --model.width 8 --steps 200 {ADAMW}",
    "wrn16_4": f"--model.name wrn16_4 --model.width 4 --steps 200 {ADAMW}",
    "xception": f"--model.name xception --model.width 8 --model.depth 1 --steps 300 {ADAMW}",
    # Normalised: in a black patch its layer norms would find no variance, and multiply gradients by 1000 each.
    "convnext_t": f"--model.name convnext_t --model.width 16 --model.patch 1 --steps 300 {ADAMW}"
    " --data.mean 0.3 --data.std 0.38",
    "efficientnet_b0": f"--model.name efficientnet_b0 --model.width 8 --steps 200 {ADAMW}",
    "mobilenetv3_small": f"--model.name mobilenetv3_small --model.width 16 --steps 200 {ADAMW}",
    "regnety_004": f"--model.name regnety_004 --model.width 16 --steps 200 {ADAMW}",
    "densenet121": f"--model.name densenet121 --model.width 8 --steps 200 {ADAMW}",
    "vit": f"--config {CONFIGS}/digits_vit.toml",
    "unet": f"--config {CONFIGS}/digits_unet.toml",
    "bert": f"--config {CONFIGS}/docstrings_bert.toml",
    "gpt2": f"--config {CONFIGS}/tiny_gpt2.toml",
}


def train(flags: str, policy: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        own = ["--precision.policy", *policy.split(), "--seed", str(seed), "--output_dir", f"{folder}/run"]
        config = load_config([*flags.split(), *own, "--report.no_plot", "--report.no_tensorboard"])
        with contextlib.redirect_stdout(io.StringIO()):
            summary = mpjax.run(config)
        curve = {
            each["step"]: each["train/loss"]
            for each in read_metrics(f"{folder}/run/metrics.jsonl")
            if "train/loss" in each
        }
    metric = TASKS[config.task].score
    kept = ("test/loss", "steps", "skipped", "parameters", "seconds")
    found = {"metric": metric, "score": summary[f"test/{metric}"], **{name: summary[name] for name in kept}}
    return found | {"train/loss": curve}


def table(results: dict) -> str:
    """Mean of the seeds, lowest to highest, of each model under each policy."""
    policies = list(dict.fromkeys(policy for runs in results.values() for policy in runs))
    lines = ["| model | parameters | score | " + " | ".join(policies) + " |", "| --- " * (3 + len(policies)) + "|"]
    for name, by_policy in results.items():
        first = next(iter(next(iter(by_policy.values())).values()))
        cells = [f"`{name}`", f"{first['parameters']:,}", first["metric"]]
        for policy in policies:
            scores = [run["score"] for run in by_policy.get(policy, {}).values()]
            span = f" ({min(scores):.4g} to {max(scores):.4g}, {len(scores)} seeds)" if len(scores) > 1 else ""
            cells.append(f"{statistics.mean(scores):.4g}{span}" if scores else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--tasks", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    saved = arguments.output and arguments.output.exists()
    results: dict = json.loads(arguments.output.read_text())["results"] if saved else {}
    for seed in range(arguments.seeds):
        for name in arguments.tasks:
            for policy in arguments.policies:  # interleaved, so that a busy machine slows all of them alike
                runs = results.setdefault(name, {}).setdefault(policy, {})
                if str(seed) in runs:
                    continue
                runs[str(seed)] = train(FLAGS[name], policy, seed)
                print(name, policy, seed, runs[str(seed)], file=sys.stderr, flush=True)
                if arguments.output:
                    arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
