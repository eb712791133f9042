"""What every architecture learns in 50 steps on real data, under each policy and over three seeds.

A policy holds the loss if the mean of its seeds differs from float32's by no more than seeds of float32 do. Networks of
folders are built from a config.json, with random weights. Texts are what Python's standard library says of itself, and
images the handwritten digits.

    python benchmarks/architectures.py --output benchmarks/results/architectures_cpu.json
    python benchmarks/architectures.py --only qwen3 t5 --policies float32 mixed_float16

Runs that the output file has are kept, so that it can be stopped and started again.
"""

import argparse
import contextlib
import io
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any


sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import numpy as np
from machine import describe
from sklearn.datasets import load_digits

import mpjax
from mpjax.config import load_config
from mpjax.errors import UsageError


ROOT = pathlib.Path(__file__).parents[1]
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "O1", "bfloat16", "mixed_float8")

TRAINING = (
    "--steps 50 --optimizer.name adamw --optimizer.learning_rate 2e-3 --optimizer.warmup 5 --optimizer.clip_norm 1 "
    "--data.batch_size 16 --loop.eval_every 50 --loop.save_every 50 --loop.log_every 50 --report.no_plot "
    "--report.no_tensorboard --training.label_smoothing 0"
)
TEXTS = "--data.name docstrings --data.tokenizer bytes --data.length 64"
_FAST = "--data.batch_size 64 --optimizer.learning_rate 5e-3"  # so that 50 steps are enough to learn something
WORDS = f"--task text_classification --data.name docstrings --data.tokenizer words --data.length 32 {_FAST}"
DIGITS = "--data.name digits --data.crop_padding 0 --data.mean 0.3 --data.std 0.35"
PATCHES = f"{DIGITS} {_FAST}"

DECODER: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
GEMMA = {
    **DECODER,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
}
ENCODER: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 264,
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_heads": 4,
    "num_layers": 2,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_channels": 1,
    "image_size": 8,
    "patch_size": 2,
}

_CAPTIONS = (
    f"--task image_text --data.name {__file__}:captions --data.tokenizer bytes --data.length 24 --data.mean 0.3 "
)
_CAPTIONS += "--data.std 0.35 --data.crop_padding 0 --data.eval_batch_size 16"


def captions() -> tuple[dict[str, Any], dict[str, Any]]:
    """The digits, each with its number in words; a training and a test split."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    pixels, labels = load_digits(return_X_y=True)
    images = np.asarray(np.reshape(pixels, (-1, 8, 8, 1)) * (255 / 16), np.uint8).repeat(3, axis=-1)
    texts = np.asarray([f"a written {words[label]}" for label in labels])
    test = np.arange(len(texts)) % 5 == 0
    return {"image": images[~test], "text": texts[~test]}, {"image": images[test], "text": texts[test]}


def _towers(kind: str) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    vision = {**sizes, "model_type": f"{kind}_vision_model", "image_size": 8, "patch_size": 2}
    text = {**sizes, "model_type": f"{kind}_text_model", "vocab_size": 264, "max_position_embeddings": 24}
    wide = {"projection_dim": 64} if kind == "clip" else {}
    return {"model_type": kind, "vision_config": vision, "text_config": text, **wide}


FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (
        {
            **DECODER,
            "model_type": "llama",
            "tie_word_embeddings": False,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        f"--task language_modeling {TEXTS}",
    ),
    "mistral": ({**DECODER, "model_type": "mistral", "sliding_window": 16}, f"--task language_modeling {TEXTS}"),
    "qwen2": ({**DECODER, "model_type": "qwen2"}, f"--task language_modeling {TEXTS}"),
    "qwen3": ({**DECODER, "model_type": "qwen3"}, f"--task language_modeling {TEXTS}"),
    "gemma2": ({**GEMMA, "model_type": "gemma2"}, f"--task language_modeling {TEXTS}"),
    "gemma3_text": ({**GEMMA, "model_type": "gemma3_text"}, f"--task language_modeling {TEXTS}"),
    "qwen3_moe": (
        {**DECODER, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        f"--task language_modeling {TEXTS}",
    ),
    "mixtral": (
        {**DECODER, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        f"--task language_modeling {TEXTS}",
    ),
    "mamba2": (
        {
            "model_type": "mamba2",
            "vocab_size": 264,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "eos_token_id": 1,
        },
        f"--task language_modeling {TEXTS}",
    ),
    "smollm3": ({**DECODER, "model_type": "smollm3"}, f"--task language_modeling {TEXTS}"),
    "bert": ({**ENCODER, "model_type": "bert"}, WORDS),
    "roberta": ({**ENCODER, "model_type": "roberta", "type_vocab_size": 1}, WORDS),
    "modernbert": ({**ENCODER, "model_type": "modernbert", "local_attention": 16}, WORDS),
    "t5": (T5, "--task text_to_text"),
    "t5 gated": ({**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "--task text_to_text"),
    "vit": ({**VISION, "model_type": "vit", "intermediate_size": 128}, PATCHES),
    "deit": ({**VISION, "model_type": "deit", "intermediate_size": 128}, PATCHES),
    "dinov2": ({**VISION, "model_type": "dinov2", "mlp_ratio": 2}, PATCHES),
    "dinov2 registers": ({**VISION, "model_type": "dinov2_with_registers", "use_swiglu_ffn": True}, PATCHES),
    "dinov3": ({**VISION, "model_type": "dinov3_vit", "intermediate_size": 128, "num_register_tokens": 2}, PATCHES),
    "swin": (
        {
            "model_type": "swin",
            "num_channels": 1,
            "image_size": 8,
            "patch_size": 1,
            "window_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "drop_path_rate": 0.0,
        },
        PATCHES,
    ),
    "siglip (images)": ({**VISION, "model_type": "siglip_vision_model", "intermediate_size": 128}, PATCHES),
    "clip": (_towers("clip"), _CAPTIONS),
    # At 2e-3 it stays where it begins, and the first steps, which float16 skips, are the ones that get it there.
    "siglip": (_towers("siglip"), f"{_CAPTIONS} --optimizer.learning_rate 5e-4"),
    "whisper": (
        {
            "model_type": "whisper",
            "d_model": 64,
            "vocab_size": 264,
            "num_mel_bins": 80,
            "max_source_positions": 50,
            "max_target_positions": 24,
            "decoder_start_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
            **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        },
        "--task transcription --data.tokenizer bytes --data.length 12",
    ),
    "convnextv2": (
        {
            "model_type": "convnextv2",
            "num_channels": 1,
            "image_size": 8,
            "patch_size": 1,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [1, 1, 1, 1],
        },
        DIGITS,
    ),
}
"""The config.json of an architecture and the flags of its run."""

NAMED = {
    "resnet18": f"{DIGITS} --model.width 8",
    "resnext50": f"{DIGITS} --model.name resnext50 --model.width 8",
    "wrn16_4": f"{DIGITS} --model.name wrn16_4 --model.width 4",
    "xception": f"{DIGITS} --model.name xception --model.width 8 --model.depth 1",
    "convnext_t": f"{DIGITS} --model.name convnext_t --model.width 16 --model.patch 1",
    "efficientnet_b0": f"{DIGITS} --model.name efficientnet_b0 --model.width 8",
    "mobilenetv3_small": f"{DIGITS} --model.name mobilenetv3_small --model.width 16",
    "regnety_004": f"{DIGITS} --model.name regnety_004 --model.width 16",
    "densenet121": f"{DIGITS} --model.name densenet121 --model.width 8",
    "vit_ti16": f"{PATCHES} --model.name vit_ti16 --model.patch 2 --model.width 64 --model.depth 2 --model.heads 4",
    "dit": "--task diffusion --data.name digits --model.name dit_s2 --model.width 64 --model.depth 2 --model.heads 4",
    "unet_ddpm": "--task diffusion --data.name digits --model.name unet_ddpm --model.width 16 --model.depth 1",
    "unet": "--task segmentation --data.name digits_canvas --model.name unet --model.width 8 --model.depth 2",
    "bert-base": f"{WORDS} --model.name bert --model.width 64 --model.depth 2 --model.heads 4",
    "gpt2": f"--task language_modeling {TEXTS} --model.name gpt2 --model.width 64 --model.depth 2 --model.heads 4",
}
"""The flags of networks that have a name."""


def flags_of(name: str, folder: pathlib.Path) -> str:
    """The flags of a run; writes what they name into `folder`."""
    if name in NAMED:
        return NAMED[name]
    config, flags = FOLDERS[name]
    model = folder / name.replace(" ", "_")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    if "text_to_text" in flags:
        flags += f" {pairs(folder)}"
    if "transcription" in flags:
        flags += f" {sounds(folder, model)}"
    return f"--model.name hf:{model} --model.pretrained none {flags}"


def sounds(folder: pathlib.Path, model: pathlib.Path) -> str:
    """Writes melodies of four tones with their names, as no licence allows speech here; returns the flags."""
    import soundfile  # local, as it is an extra

    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "chunk_length": 1}
    (model / "preprocessor_config.json").write_text(json.dumps(features))
    flags = f"--data.name folder:{folder / 'tones'}"
    if (folder / "tones").exists():
        return flags
    draw, times = np.random.default_rng(0), np.arange(4000) / 16_000
    tones = {"c": 262, "d": 294, "e": 330, "f": 349, "g": 392, "a": 440, "b": 494}
    for split, count in (("train", 200), ("test", 40)):
        (folder / "tones" / split).mkdir(parents=True)
        rows = ["file_name,text"]
        for number in range(count):
            names = draw.choice([*tones], 4)
            waves = [np.sin(2 * np.pi * tones[name] * times) for name in names]
            soundfile.write(folder / "tones" / split / f"{number}.flac", 0.5 * np.concatenate(waves), 16_000)
            rows.append(f"{number}.flac,{''.join(names)}")
        (folder / "tones" / split / "metadata.csv").write_text("\n".join(rows))
    return flags


def pairs(folder: pathlib.Path) -> str:
    """Writes questions with the first sentence of a docstring as the answer, and returns the flags that name them."""
    if not (folder / "chats").exists():
        text = [sys.executable, str(ROOT / "examples/nanochat/text.py"), "--output", str(folder)]
        subprocess.run(text, check=True, stdout=subprocess.DEVNULL)
    return (
        f"--data.name hf:{folder}/chats/train.jsonl --data.train_split train[:4000] --data.test_split train[4000:4200] "
        "--data.columns source prompt target completion --data.tokenizer bytes --data.length 64"
    )


def train(flags: str, policy: str, seed: int) -> dict[str, Any]:
    """Trains, and returns the losses and the numbers of steps and of skipped ones; or what refused the policy."""
    with tempfile.TemporaryDirectory() as output:
        run = f"--precision.policy {policy} --seed {seed} --output_dir {output}/run"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                summary = mpjax.run(load_config(f"{TRAINING} {flags} {run}".split()))
        except UsageError as error:
            if policy == "float32":
                raise
            return {"refused": str(error).splitlines()[0]}
    return {name: summary[name] for name in ("test/loss", "steps", "skipped", "parameters")}


def table(results: dict[str, Any]) -> str:
    """The mean loss of each architecture under each policy, the spread of float32's seeds, and who is outside of it."""
    policies = list(dict.fromkeys(policy for runs in results.values() for policy in runs))
    lines = ["| architecture | parameters | " + " | ".join(policies) + " | seeds of float32 differ by | outside |"]
    lines.append("| --- " * (len(policies) + 4) + "|")
    for name, by_policy in results.items():
        losses = {
            policy: [run.get("test/loss", math.nan) for run in runs.values()] for policy, runs in by_policy.items()
        }
        means = {policy: statistics.mean(values) for policy, values in losses.items() if values}
        noise = max(losses["float32"]) - min(losses["float32"])
        outside = [policy for policy, mean in means.items() if abs(mean - means["float32"]) > noise]
        cells = [f"{means[policy]:.4f}" if not math.isnan(means[policy]) else "refused" for policy in policies]
        parameters = next(iter(by_policy["float32"].values()))["parameters"]
        lines.append(
            f"| `{name}` | {parameters:,} | {' | '.join(cells)} | {noise:.4f} | {', '.join(outside) or 'none'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Trains what the output file does not have yet, and prints the table."""
    names = [*NAMED, *FOLDERS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    saved = arguments.output and arguments.output.exists()
    results: dict[str, Any] = json.loads(arguments.output.read_text())["results"] if saved else {}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")  # seeds share their programs
        for name in arguments.only:
            flags = flags_of(name, pathlib.Path(folder))
            for policy in arguments.policies:
                runs = results.setdefault(name, {}).setdefault(policy, {})
                for seed in range(arguments.seeds):
                    if str(seed) in runs:
                        continue
                    runs[str(seed)] = train(flags, policy, seed)
                    print(name, policy, seed, runs[str(seed)], file=sys.stderr, flush=True)
                    if arguments.output:
                        content = {**describe(), "results": results}
                        arguments.output.write_text(json.dumps(content, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
