"""Checks that the settings of a run are in range, and reports all faults at once."""

import math
from collections.abc import Iterator

from mpjax.config.choices import TASKS, parse_model_name
from mpjax.config.schema import Config
from mpjax.errors import UsageError


def check(config: Config) -> None:
    """Raises UsageError that lists every setting out of range, with its value and the valid values."""
    if faults := list(_faults(config)):
        raise UsageError("\n".join(faults))


def _faults(config: Config) -> Iterator[str]:
    at_least_one = {
        "data.batch_size": config.data.batch_size,
        "data.eval_batch_size": config.data.eval_batch_size,
        "data.workers": config.data.workers,
        "data.length": config.data.length,
        "precision.patience": config.precision.patience,
        "training.accumulate": config.training.accumulate,
        "training.steps_per_call": config.training.steps_per_call,
        "loop.keep": config.loop.keep,
    }
    not_negative = {
        "data.image_size": config.data.image_size,
        "data.num_classes": config.data.num_classes,
        "model.width": config.model.width,
        "model.depth": config.model.depth,
        "model.heads": config.model.heads,
        "model.patch": config.model.patch,
        "data.in_memory_mb": config.data.in_memory_mb,
        "data.on_device_mb": config.data.on_device_mb,
        "data.crop_padding": config.data.crop_padding,
        "data.randaugment_ops": config.data.randaugment_ops,
        "data.mixup": config.data.mixup,
        "data.cutmix": config.data.cutmix,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.eps": config.optimizer.eps,
        "optimizer.clip_norm": config.optimizer.clip_norm,
        "seed": config.seed,
    }
    below_one = {
        "optimizer.momentum": config.optimizer.momentum,
        "optimizer.b1": config.optimizer.b1,
        "optimizer.b2": config.optimizer.b2,
        "training.label_smoothing": config.training.label_smoothing,
        "training.ema": config.training.ema,
        "model.dropout": config.model.dropout,
        "data.random_resized_crop": config.data.random_resized_crop,
    }
    for name, value in at_least_one.items():
        if value < 1:
            yield f"--{name} is {value}: wanted at least 1"
    for name, value in not_negative.items():
        if not 0 <= value < math.inf:
            yield f"--{name} is {value}: wanted 0 or more"
    for name, value in (at_least_one | not_negative).items():
        if isinstance(value, int) and value >= 2**31 and name != "seed":  # the data pipeline checks the seed
            yield f"--{name} is {value}: wanted at most 2,147,483,647"
    for name, value in below_one.items():
        if not 0 <= value < 1:
            yield f"--{name} is {value}: wanted from 0 up to, not including, 1"
    if not 0 <= config.data.random_erasing <= 1:
        yield f"--data.random_erasing is {config.data.random_erasing}: wanted a share from 0 to 1"
    if not 0 <= config.data.randaugment_magnitude <= 10:
        yield f"--data.randaugment_magnitude is {config.data.randaugment_magnitude}: wanted 0 to 10"
    try:
        parse_model_name(config.model.name)
    except ValueError as error:
        yield f"--model.name: {error}"
    if config.task not in TASKS:
        yield f"--task is {config.task!r}: wanted one of {', '.join(TASKS)}"
    if config.steps.amount <= 0:
        yield f"--steps is {config.steps}: wanted at least one step"
    if not all(0 < value < math.inf for value in config.data.std):
        yield f"--data.std is {config.data.std}: wanted positive numbers"
    if not all(map(math.isfinite, config.data.mean)):
        yield f"--data.mean is {config.data.mean}: wanted finite numbers"
