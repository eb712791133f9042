"""What a plan expects of Llama on 8 to 1,024 GPUs, beside what torchtitan, MaxText and NeMo published for its shapes.

No GPU is needed: each step is compiled whole for its number of GPUs and its mesh, in some ten seconds.

    python scripts/plan.py --install
    python benchmarks/sharding.py --output benchmarks/results/sharding.json
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax.commands import fields_of, planned_step
from mpjax.config import GpuName, load_config
from mpjax.plan import Estimate, estimates


TITAN_A100 = "torchtitan, docs/performance.md, 2024"
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, 2024-12"
TITAN_H200 = "torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md, 2025-06"
TITAN_CONTEXT = "torchtitan, docs/performance.md, 2025-01, table 2"
NEMO = "NeMo 24.12, performance_long_sequence.md; tokens from its TFLOPS by nemo/utils/flops_formulas.py"
MAXTEXT_2 = "MaxText 2024-12-09, NVIDIA/dgxc-benchmarking 25.01, maxtext/README_70b.md, 2025-03"
MAXTEXT_3 = "MaxText, NVIDIA/dgxc-benchmarking 25.04.01, README of MaxText Llama3 70B, 2025-05"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**18,
}
"""What the `config.json` of the models have in common; the length is only the largest that a plan may have."""

LLAMA_3 = LLAMA | {"vocab_size": 128_256, "rope_theta": 500_000.0}

MODELS: Mapping[str, dict] = {
    "Llama 3 8B": LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama 3 70B": LLAMA_3
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "Llama 2 7B": LLAMA
    | {"vocab_size": 32_000, "rope_theta": 10_000.0, "num_key_value_heads": 32}
    | {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama 2 70B": LLAMA
    | {"vocab_size": 32_000, "rope_theta": 10_000.0}
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published run.

    Attributes:
      model: a name in `MODELS`.
      gpu: the kind of GPU.
      devices: the number of GPUs.
      fsdp: the size of that axis; the rest are replicas.
      context: the size of that axis.
      tensor: the size of that axis; norms are divided too if it is above 1.
      batch: sequences per step, over all GPUs.
      length: tokens of a sequence.
      policy: mpjax's policy for the published precision.
      remat: mpjax's setting that is nearest to the published one, which is named in `keeps`.
      keeps: what is kept for the backward pass in the published run.
      tokens: tokens per second and GPU, published.
      gigabytes: GiB of memory per GPU, published; None if it was not.
      source: document and date.
    """

    model: str
    gpu: GpuName
    devices: int
    fsdp: int
    batch: int
    tokens: float
    source: str
    keeps: str
    remat: str
    context: int = 1
    tensor: int = 1
    length: int = 8192
    policy: str = "mixed_bfloat16"
    gigabytes: float | None = None


SELECTIVE = "selective checkpointing, every second product"
QKV = "queries, keys and values"


def of_maxtext(model: str, seconds: Mapping[int, float], source: str, length: int, policy: str) -> list[Published]:
    """Runs of MaxText on H100s with two sequences per GPU: seconds per step by number of GPUs."""
    return [
        Published(
            model=model,
            gpu="h100",
            devices=devices,
            fsdp=min(devices, 256 if devices == 256 else 128),
            batch=2 * devices,
            length=length,
            policy=policy,
            remat="full",
            keeps=QKV,
            tokens=2 * length / step,
            source=source,
        )
        for devices, step in seconds.items()
    ]


def of_nemo(devices: int, context: int, length: int, tera: float) -> Published:
    """Runs of Llama 2 7B on H100s in float8, with `tensor` 4, 8 replicas and one sequence each.

    `tera` is published: 1e12 operations per second and GPU, which count attention without a mask.
    """
    model = MODELS["Llama 2 7B"]
    layers, width, hidden = (model[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    products = layers * (4 * width**2 + 3 * width * hidden) + width * model["vocab_size"]
    operations = 6 * products + 12 * layers * width * length
    return Published(
        model="Llama 2 7B",
        gpu="h100",
        devices=devices,
        fsdp=1,
        context=context,
        tensor=4,
        batch=8,
        length=length,
        remat="none",
        keeps="not published",
        tokens=tera * 1e12 / operations,
        source=NEMO,
    )


FLOAT8 = "mixed_float8"
of_titan_8b = functools.partial(Published, model="Llama 3 8B", keeps=SELECTIVE, remat="dots")

RUNS = [
    of_titan_8b(gpu="a100", devices=64, fsdp=64, batch=64, tokens=2973, source=TITAN_A100),
    Published(
        model="Llama 3 70B",
        gpu="a100",
        devices=64,
        fsdp=64,
        batch=64,
        tokens=331,
        source=TITAN_A100,
        remat="full",
        keeps="inputs of blocks",
    ),
    of_titan_8b(gpu="h100", devices=8, fsdp=8, batch=16, tokens=6667, gigabytes=77.0, source=TITAN_H100),
    of_titan_8b(gpu="h100", devices=128, fsdp=128, batch=256, tokens=6514, gigabytes=62.0, source=TITAN_H100),
    of_titan_8b(
        gpu="h100",
        devices=128,
        fsdp=128,
        batch=256,
        tokens=8380,
        gigabytes=61.8,
        source=TITAN_H100,
        policy=FLOAT8,
    ),
    of_titan_8b(
        gpu="h200",
        devices=32,
        fsdp=32,
        batch=64,
        tokens=10938,
        gigabytes=47.96,
        source=TITAN_H200,
        policy=FLOAT8,
    ),
    of_titan_8b(
        gpu="h200",
        devices=64,
        fsdp=64,
        batch=128,
        tokens=10753,
        gigabytes=46.97,
        source=TITAN_H200,
        policy=FLOAT8,
    ),
    *(
        Published(
            model="Llama 3 8B",
            gpu="h100",
            devices=8,
            fsdp=8 // context,
            context=context,
            batch=8 // context,
            length=32_768 * context,
            policy=FLOAT8,
            remat="full",
            keeps="inputs of blocks",
            tokens=tokens,
            gigabytes=gigabytes,
            source=TITAN_CONTEXT,
        )
        for context, tokens, gigabytes in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5))
    ),
    of_nemo(64, 2, 65_536, 574),
    of_nemo(128, 4, 131_072, 555),
    of_nemo(256, 8, 262_144, 549),
    *of_maxtext(
        "Llama 3 70B",
        {128: 15.563, 256: 15.444, 512: 15.519, 1024: 15.603},
        MAXTEXT_3,
        8192,
        "mixed_bfloat16",
    ),
    *of_maxtext("Llama 3 70B", {128: 9.074, 1024: 9.483}, MAXTEXT_3, 8192, FLOAT8),
    *of_maxtext(
        "Llama 2 70B",
        {64: 6.999, 128: 7.072, 256: 7.153, 512: 7.091, 1024: 7.084},
        MAXTEXT_2,
        4096,
        "mixed_bfloat16",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON file")
    output = parser.parse_args().output
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in MODELS.items():
            (model := folder_of(folder, name)).mkdir()
            (model / "config.json").write_text(json.dumps(settings))
        for run in RUNS:
            rows.append(row := compared(run, planned(run, folder)))
            print(json.dumps(row))
            # A result that ends early is still one.
            output.write_text(json.dumps({"machine": describe(), "runs": rows}, indent=1) + "\n")


def folder_of(folder: str, model: str) -> pathlib.Path:
    return pathlib.Path(folder, model.replace(" ", "_"))


def planned(run: Published, folder: str) -> Estimate:
    """Compiles the step of a run, whose model's settings are in `folder`, and estimates it."""
    config = load_config(
        f"--task language_modeling --data.name docstrings --data.length {run.length} --data.batch_size {run.batch} "
        f"--model.name hf:{folder_of(folder, run.model)} --model.scan_blocks --optimizer.name adamw "
        f"--precision.policy {run.policy} --training.chunked_loss 4096 --training.remat {run.remat} "
        f"--mesh.fsdp {run.fsdp} --mesh.context {run.context} --mesh.tensor {run.tensor} "
        f"{'--mesh.sequence' if run.tensor > 1 else ''}".split()
    )
    fields = fields_of(config, vocabulary=MODELS[run.model]["vocab_size"])
    (plan,) = estimates([run.gpu], [planned_step(config, fields)], devices=run.devices, most=0, fit=False)
    return plan


def compared(run: Published, plan: Estimate) -> dict:
    """What was published, what is expected, and the error: expected tokens/s over published ones, minus 1."""
    expected, sent = plan.communication.expected, plan.communication.sent
    assert expected is not None
    assert sent is not None
    tokens = run.length * run.batch / run.devices
    return {
        "published": dataclasses.asdict(run),
        "mesh": dict(plan.mesh),
        "step": plan.expected_seconds,
        "all_hidden": expected.all_hidden,
        "none_hidden": expected.none_hidden,
        "tokens": tokens / plan.expected_seconds,
        "error": tokens / plan.expected_seconds / run.tokens - 1,
        "gigabytes": plan.memory.total / 2**30,
        "efficiency": expected.efficiency,
        "exposed": expected.exposed,
        "sent_within": sent.within,
        "sent_between": sent.between,
    }


if __name__ == "__main__":
    main()
