"""Suggests flags of mpjax for flags that only other training programs or earlier versions have."""

import collections
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax.config.durations import Duration
from mpjax.config.removed import REMOVED
from mpjax.config.schema import Config
from mpjax.errors import UsageError


DEVICES = frozenset({"accelerator", "cuda", "device", "devices", "gpu", "gpu_id", "gpus", "num_gpus"})
"""Names of flags that choose devices in other programs. In mpjax, a run has no such flag, but some commands do."""

_ALL_DEVICES = (
    "leave it out: a run uses all devices that JAX finds; CUDA_VISIBLE_DEVICES=0 before the command chooses GPUs, and "
    "JAX_PLATFORMS=cpu the CPU"
)

_EPOCHS = ("epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs")
_STEPS = ("max_steps", "num_steps", "num_train_steps", "total_steps", "iterations", "max_iters")
_FOLDERS = ("output", "out", "out_dir", "outdir", "save_dir", "log_dir", "logdir", "workdir")
_MICRO_BATCHES = ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum")
_NORMS = ("max_grad_norm", "clip_grad_norm", "gradient_clip_val", "grad_clip")

_FLAGS = {
    "lr": ("--optimizer.learning_rate", "VALUE"),
    "wd": ("--optimizer.weight_decay", "VALUE"),
    "bs": ("--data.batch_size", "VALUE"),
    **dict.fromkeys(_EPOCHS, ("--steps", "VALUE epochs")),
    **dict.fromkeys(_STEPS, ("--steps", "VALUE")),
    **dict.fromkeys(("fp16", "amp", "half"), ("--precision.policy", "mixed_float16")),
    "bf16": ("--precision.policy", "mixed_bfloat16"),
    "precision": ("--precision.policy", "VALUE"),
    **dict.fromkeys(("model", "arch"), ("--model.name", "VALUE")),
    **dict.fromkeys(("data", "dataset"), ("--data.name", "VALUE")),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), ("--data.workers", "VALUE")),
    **dict.fromkeys(("optimizer", "optim", "opt"), ("--optimizer.name", "VALUE")),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), ("--optimizer.schedule", "VALUE")),
    "warmup_steps": ("--optimizer.warmup", "VALUE"),
    "warmup_epochs": ("--optimizer.warmup", "VALUE epochs"),
    **dict.fromkeys(_MICRO_BATCHES, ("--training.accumulate", "VALUE")),
    **dict.fromkeys(_NORMS, ("--optimizer.clip_norm", "VALUE")),
    **dict.fromkeys(_FOLDERS, ("--output_dir", "VALUE")),
    **dict.fromkeys(("random_seed", "manual_seed"), ("--seed", "VALUE")),
    **{name: ("--report.writers", name) for name in ("wandb", "mlflow", "comet")},
    "report_to": ("--report.writers", "VALUE"),
}
"""Names of flags in other programs, and the words to write for mpjax; VALUE stands for the user's value."""


def corrections(argv: Sequence[str], parse: Callable[[list[str]], object]) -> Iterator[tuple[str, str]]:
    """Yields each flag of a command line that mpjax knows only from other programs or earlier versions, with advice.

    The advice is a phrase such as `write --optimizer.learning_rate 0.1`. A setting without its section, such as
    `--momentum`, is yielded too if only one section has it. Any other unknown flag is not yielded.

    Args:
      argv: the arguments of train.py, without `--config`.
      parse: raises UsageError for wrong arguments. If it rejects the advice with the user's value, the advice has the
        word VALUE in its place.
    """
    settings = {name for name, _ in _flags(Config())}
    known = _inside_sections() | _FLAGS
    for index, word in enumerate(argv):
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name in settings:
            continue
        if name in DEVICES:
            yield word, _ALL_DEVICES
        elif name in REMOVED:
            yield word, f"write {REMOVED[name].instead}"
        elif name in known:
            after = itertools.takewhile(lambda other: not other.startswith("--"), argv[index + 1 :])
            yield word, f"write {shlex.join(_filled(known[name], [value] if value else [*after], parse))}"


def _flags(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the name of each setting of a section, without its inner sections, and the words that set it.

    The words are the flag and VALUE; a bool has two names, `NAME` and `no_NAME`, each with its flag alone.
    """
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, bool):
            yield from ((name, (f"--{prefix}{name}",)) for name in (field.name, f"no_{field.name}"))
        elif isinstance(value, Duration) or not dataclasses.is_dataclass(value):
            yield field.name, (f"--{prefix}{field.name}", "VALUE")


def _inside_sections() -> dict[str, tuple[str, ...]]:
    """Maps the name of a setting without its section to the words that set it, for names that only one section has."""
    sections = [field.name for field in dataclasses.fields(Config)]
    flags = [
        flag
        for name in sections
        if dataclasses.is_dataclass(section := getattr(Config(), name)) and not isinstance(section, Duration)
        for flag in _flags(section, f"{name}.")
    ]
    times = collections.Counter(name for name, _ in flags)
    return {name: words for name, words in flags if times[name] == 1}


def _filled(words: Sequence[str], values: Sequence[str], parse: Callable[[list[str]], object]) -> list[str]:
    """Replaces VALUE in `words` by `values`; without values, or if the result cannot be parsed, returns `words`."""
    if not values:
        return [*words]
    filled = [
        argument for word in words for argument in (values if word == "VALUE" else [word.replace("VALUE", values[0])])
    ]
    try:
        parse(filled)
    except UsageError:
        return [*words]
    return filled
