"""What really runs: receipts of the shipped models' training steps under all presets, on a CPU and on GPUs.

The steps are compiled for the GPUs, which need not be there. Models are as deep and wide as they must be to have each
of their layers; the dtypes that run do not depend on more.

    python scripts/plan.py --install
    python benchmarks/receipts.py --output benchmarks/results/receipts.json
    python benchmarks/receipts.py --models qwen3 t5 --presets mixed_float16 --devices h200

Models without flags here are those of `architectures.py`. Finished receipts in the output file are kept, so that it can
be stopped and started again.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import pathlib
import sys
import tempfile
from typing import Any

import jax


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from architectures import FOLDERS, flags_of
from machine import describe

from mpjax.commands import fields_of, planned_step
from mpjax.config import GpuName, load_config
from mpjax.errors import UsageError
from mpjax.plan import GPUS, PlannedStep, Receipt, receipt_of, start, target_of_gpu
from mpjax.training import make_mesh


PLANNED: dict[str, GpuName] = {"a100": "a100", "h200": "h200", "b200": "b200"}
DEVICES = ("cpu", *PLANNED)
PRESETS = ("float32", "mixed_bfloat16", "mixed_float16", "O1", "bfloat16", "float16", "O3", "float64")
FLOAT8 = ("mixed_float8", "mixed_float8_rowwise", "mixed_float8_delayed", "mixed_mxfp8")

_IMAGES = "--data.name synthetic:32x32x3:10 --data.batch_size 16 --data.crop_padding 0"
_WORDS = "--data.name docstrings --data.length 64 --data.batch_size 8 --model.depth 3 --model.width 128 --model.heads 2"
MODELS = {
    "mlp": f"{_IMAGES} --model.name mlp --model.width 64",
    "resnet18": f"{_IMAGES} --model.name resnet18 --model.width 8",
    "resnet50": f"{_IMAGES} --model.name resnet50 --model.width 8",
    "resnext50": f"{_IMAGES} --model.name resnext50 --model.width 8",
    "wrn16_4": f"{_IMAGES} --model.name wrn16_4 --model.width 4",
    "xception": f"{_IMAGES} --model.name xception --model.width 8 --model.depth 1",
    "convnext_t": f"{_IMAGES} --model.name convnext_t --model.width 16 --model.patch 4",
    "unet": "--task segmentation --data.name digits_canvas --data.batch_size 8 --model.name unet --model.width 8 "
    "--model.depth 2",
    "vit": f"{_IMAGES} --model.name vit_ti16 --model.patch 4 --model.width 128 --model.heads 2 --model.depth 3",
    "bert": f"--task text_classification {_WORDS} --model.name bert",
    "gpt2": f"--task language_modeling {_WORDS} --model.name gpt2",
}
_AS_TRAINED = ("efficientnet_b0", "mobilenetv3_small", "regnety_004", "densenet121", "dit", "unet_ddpm")
MODELS |= {name: "" for name in (*_AS_TRAINED, *FOLDERS) if name not in MODELS}
TRANSFORMERS = ("vit", "bert", "gpt2", "dit", *FOLDERS)


def presets_of(model: str) -> tuple[str, ...]:
    """Returns the presets that apply to a model: those of float8 need linear layers inside of blocks."""
    return PRESETS + FLOAT8 if model in TRANSFORMERS else PRESETS


def step_of(model: str, preset: str, folder: pathlib.Path) -> PlannedStep:
    flags = MODELS[model] or f"{flags_of(model, folder)} --data.batch_size 8"
    config = load_config(f"{flags} --precision.policy {preset}".split())
    return planned_step(config, fields_of(config))


def receipt(step: PlannedStep, device: str) -> Receipt:
    """Compiles a step for a device and reads its receipt."""
    gpu = PLANNED.get(device)
    if gpu is None:
        with step.x64_if_float64():
            train_step, given = step.on(make_mesh(jax.devices()[:1]))
            traced = train_step.trace(*given)
            executable, jaxpr = traced.lower().compile(), traced.jaxpr
        target = None
    else:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            compiled = start(pool, step, gpu).result()
        executable, jaxpr, target = compiled.executable, compiled.jaxpr, target_of_gpu(GPUS[gpu])
    return receipt_of(
        executable,
        jaxpr,
        step.plan.policy,
        target=target,
        modules={"": step.task.abstract},
        updates=step.plan.least_update,
    )


def summary(model: str, preset: str, device: str, folder: pathlib.Path) -> dict[str, Any]:
    """Returns the line of a receipt, and what is not as asked though the device could do otherwise.

    What the step reads is written into `folder`.
    """
    try:
        found = receipt(step_of(model, preset, folder), device)
    except UsageError as error:  # such as float8 on a GPU without units for it
        return {"refused": str(error)}
    rows = [row for row in found if row.verdict != "as asked"]
    return {
        "line": found.line,
        "device_limits": sorted({row.reason for row in rows if row.device_limit}),
        "surprises": dict(
            collections.Counter(
                f"{row.direction} {row.kind}: {row.verdict}, asked {row.asked or '?'}, runs in {row.operands or '-'}: "
                f"{row.reason}"
                for row in rows
                if not row.device_limit
            )
        ),
    }


def table(results: dict) -> str:
    """Formats the surprises as a table in Markdown: in how many receipts of how many models each is."""
    where: dict[tuple[str, str, str], list[str]] = collections.defaultdict(list)
    for model, by_preset in results.items():
        for preset, by_device in by_preset.items():
            for device, found in by_device.items():
                for text in found.get("surprises", {}):
                    where[device, preset, text].append(model)
    lines = ["| device | preset | models | what |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {d} | {p} | {', '.join(models)} | {t} |" for (d, p, t), models in where.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the receipts")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--presets", nargs="+", choices=[*PRESETS, *FLOAT8], default=[*PRESETS, *FLOAT8])
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    arguments = parser.parse_args()
    saved = arguments.output and arguments.output.exists()
    results: dict = json.loads(arguments.output.read_text())["results"] if saved else {}
    with tempfile.TemporaryDirectory() as folder:
        for model, device in itertools.product(arguments.models, arguments.devices):
            for preset in [preset for preset in presets_of(model) if preset in arguments.presets]:
                by_device = results.setdefault(model, {}).setdefault(preset, {})
                if device not in by_device:
                    by_device[device] = summary(model, preset, device, pathlib.Path(folder))
                    print(model, preset, device, json.dumps(by_device[device]), file=sys.stderr, flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps({**describe(), "results": results}, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
