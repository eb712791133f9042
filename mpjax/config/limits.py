"""Checks that settings are in range, and reports all faults at once. All ranges are in this file."""

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mpjax.config.choices import (
    AUTO,
    BEST,
    SETTINGS_OF_RULES,
    TASKS,
    PlotFormat,
    parse_model_name,
    parse_optimizer_name,
    parse_schedule_name,
)
from mpjax.config.paths import expanded
from mpjax.config.schema import Config, Data, Distributed, Optimizer, Training
from mpjax.config.several_words import is_a
from mpjax.errors import UsageError


AT_LEAST_ONE = (
    "data.batch_size",
    "data.eval_batch_size",
    "data.length",
    "precision.patience",
    "training.accumulate",
    "training.steps_per_call",
    "loop.keep",
)

NOT_NEGATIVE = (
    "data.workers",
    "data.image_size",
    "data.num_classes",
    "model.width",
    "model.depth",
    "model.heads",
    "model.patch",
    "data.in_memory_mb",
    "data.on_device_mb",
    "data.randaugment_ops",
    "data.mixup",
    "data.cutmix",
    "training.chunked_loss",
    "optimizer.learning_rate",
    "optimizer.rest_learning_rate",
    "optimizer.weight_decay",
    "optimizer.eps",
    "optimizer.clip_norm",
    "report.images",
    "loop.stop_after",
    "loop.stop_delta",
    "seed",
)

BELOW_ONE = (
    "optimizer.momentum",
    "optimizer.rest_momentum",
    "optimizer.b1",
    "optimizer.b2",
    "training.label_smoothing",
    "training.ema",
    "model.dropout",
    "data.random_resized_crop",
)


def is_auto(config: Config) -> bool:
    """True if a setting depends on memory, so that `commands/fit.py` must run first."""
    return AUTO in (config.data.batch_size, config.training.accumulate)


def check(config: Config) -> None:
    """Raises UsageError that lists every setting of a wrong type or out of range, with its value and the valid ones."""
    require_types(config)
    _require_none([*_ranges(config), *_data(config.data), *_others(config), *_processes(config.distributed)])


def require_types(config: Config) -> None:
    """Raises UsageError that lists every setting of a wrong type, which Python code may set."""
    _require_none([*wrong_types(config)])


def check_distributed(distributed: Distributed) -> None:
    """Raises UsageError like `check`, for the `distributed` section alone."""
    _require_none([*wrong_types(distributed, "distributed.")])
    _require_none([*_processes(distributed)])


def check_data(data: Data) -> None:
    """Raises UsageError like `check`, for the `data` section alone."""
    _require_none([*wrong_types(data, "data.")])
    _require_none([*_ranges(data, "data."), *_data(data)])


def _require_none(faults: list[str]) -> None:
    if faults:
        raise UsageError("\n".join(faults))


def _ranges(settings: Config | Data, prefix: str = "") -> Iterator[str]:
    """Yields the faults by the tables above, for names that start with `prefix`, the name of the section."""

    def values(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name in names:
            if name.startswith(prefix):
                value: Any = settings
                for part in name.removeprefix(prefix).split("."):
                    value = getattr(value, part)
                yield name, value

    for name, value in values(AT_LEAST_ONE):
        if value == AUTO and name in ("data.batch_size", "training.accumulate"):
            yield f"--{name} auto: train.py and find_lr.py find the number; for other commands, write it"
        elif value < 1:
            yield f"--{name} is {value}: wanted at least 1"
    for name, value in values(NOT_NEGATIVE):
        if not 0 <= value < math.inf:
            yield f"--{name} is {value}: wanted 0 or more"
    for name, value in values((*AT_LEAST_ONE, *NOT_NEGATIVE)):
        if isinstance(value, int) and value >= 2**31 and name != "seed":  # the data pipeline checks the seed
            yield f"--{name} is {value}: wanted at most 2,147,483,647"
    for name, value in values(BELOW_ONE):
        if not 0 <= value < 1:
            yield f"--{name} is {value}: wanted from 0 up to, not including, 1"


def _data(data: Data) -> Iterator[str]:
    if not -1 <= data.crop_padding < 2**31:
        yield f"--data.crop_padding is {data.crop_padding}: wanted a number of pixels, 0 for none"
    if data.crop_edges != "black" and not data.padding:
        yield f"--data.crop_edges {data.crop_edges}: images are not shifted; write --data.crop_padding 2"
    if not 0 <= data.random_erasing <= 1:
        yield f"--data.random_erasing is {data.random_erasing}: wanted a share from 0 to 1"
    if not 0 <= data.randaugment_magnitude <= 10:
        yield f"--data.randaugment_magnitude is {data.randaugment_magnitude}: wanted 0 to 10"
    if data.range and (len(data.range) != 2 or len(set(data.range)) != 2 or not all(map(math.isfinite, data.range))):
        yield f"--data.range is {data.range}: wanted two different numbers, as in --data.range 0 4095"
    if not all(0 < value < math.inf for value in data.std):
        yield f"--data.std is {data.std}: wanted positive numbers"
    if not all(map(math.isfinite, data.mean)):
        yield f"--data.mean is {data.mean}: wanted finite numbers"
    if len(set(data.header)) < len(data.header):
        yield f"--data.header is {' '.join(data.header)}: wanted different names"
    if data.header and not (name := str(data.name)).startswith("hf:"):
        is_file = name.endswith((".csv", ".tsv")) or any(expanded(name).glob("*.[ct]sv"))
        yield (
            f"--data.header is for csv and tsv files, as in --data.name hf:FILE.tsv, not for --data.name {data.name}; "
            + (f"write --data.name hf:{data.name}" if is_file else "leave it out")
        )
    if data.alternate_flips and not data.flip:
        yield "--data.alternate_flips without --data.flip: no image is flipped; wanted both or none"
    yield from _mix(data)
    if not (data.antialias or data.image_size):
        yield "--data.no_antialias without --data.image_size, which is 0: no image is resized; wanted both or none"


_SMALLEST_SHARE = 0.001  # the share of one example per block of a mixture (`data/order.py`)


def _mix(data: Data) -> Iterator[str]:
    for name, share in data.mix.items():
        if not _SMALLEST_SHARE <= share < 1:
            yield f"--data.mix {name} {share}: wanted a share of the training examples, from {_SMALLEST_SHARE} up to 1"
        if name == data.name:
            yield f"--data.mix {name} {share}: that is --data.name, which has the rest of the examples; leave it out"
    if data.mix and not (rest := 1 - sum(data.mix.values())) > _SMALLEST_SHARE / 2:
        yield (
            f"--data.mix leaves a share of {rest:.3g} to --data.name {data.name}: wanted shares of the others that sum "
            f"to at most {1 - _SMALLEST_SHARE}"
        )


def _others(config: Config) -> Iterator[str]:
    named = {
        "model.name": (parse_model_name, config.model.name),
        "optimizer.name": (parse_optimizer_name, config.optimizer.name),
        "optimizer.schedule": (parse_schedule_name, config.optimizer.schedule),
    }
    for name, (parse, value) in named.items():
        try:
            parse(str(value))
        except ValueError as error:
            yield f"--{name}: {error}"
    if config.task not in TASKS:
        yield f"--task is {config.task!r}: wanted one of {', '.join(TASKS)}"
    if config.optimizer.rest_learning_rate and not config.optimizer.learning_rate:
        yield "--optimizer.learning_rate is 0: wanted a positive rate, of which rest_learning_rate is a multiple"
    yield from _own_parts(config)
    if not 0 < config.optimizer.layer_decay <= 1:
        yield f"--optimizer.layer_decay is {config.optimizer.layer_decay}: wanted above 0, up to 1"
    for pattern, factor in config.optimizer.rates.items():
        if not 0 < factor < math.inf:
            yield (
                f"--optimizer.rates {pattern} {factor}: wanted a positive factor; to leave parameters as they are, "
                f"write --training.freeze {pattern}"
            )
    if config.optimizer.normalise_filters and config.optimizer.name != "muon":
        yield f"--optimizer.normalise_filters with --optimizer.name {config.optimizer.name}: wanted muon, or neither"
    if any(not 0 <= seed < 2**32 for seed in config.seeds):
        yield f"--seeds is {' '.join(map(str, config.seeds))}: wanted 0 to 2**32 - 1"
    if config.seeds and config.seed != Config().seed:
        shown = " ".join(map(str, config.seeds))
        yield f"--seed {config.seed} with --seeds {shown}: each run has its own; leave out --seed, or write --seed 0"
    yield from _of_other_rules(config.optimizer)
    formats, known = config.report.plot_format, get_args(PlotFormat)
    if not formats or len(set(formats) & set(known)) < len(formats):
        shown = " ".join(formats) or "empty"
        yield f"--report.plot_format is {shown}: wanted one or more of {', '.join(known)}, each once"
    if config.steps.amount <= 0:
        yield f"--steps is {config.steps}: wanted at least one step"


def _of_other_rules(optimizer: Optimizer) -> Iterator[str]:
    """Yields settings of other update rules of mpjax; a rule of optax is checked against its own signature."""
    if (rule := str(optimizer.name)) not in SETTINGS_OF_RULES:
        return
    for field in dict.fromkeys(name for names in SETTINGS_OF_RULES.values() for name in names):
        value, usual = getattr(optimizer, field), getattr(Optimizer(), field)
        if value != usual and field not in SETTINGS_OF_RULES[rule]:
            rules = " and ".join(other for other, fields in SETTINGS_OF_RULES.items() if field in fields)
            flag = f"--optimizer.{field}"
            yield f"{flag} {value} is for {rules}, not for --optimizer.name {rule}: leave it out, or write {usual}"


def _own_parts(config: Config) -> Iterator[str]:
    objective = config.training.objective
    if config.task == "own" and not objective:
        yield "--task own: wanted --training.objective FILE.py:NAME, a function of the loss and the metrics"
    smoothing = config.training.label_smoothing
    if smoothing not in (0.0, Training().label_smoothing) and (objective or config.task == "segmentation"):
        loss = "--training.objective" if objective else "the loss of segmentation"
        yield f"--training.label_smoothing {smoothing}: {loss} has none; leave it out"
    yield from _classes(config)
    if objective and (views := config.data.test_time_augmentation) != "none":
        yield f"--data.test_time_augmentation {views}: is for the task's own objective, not for --training.objective"
    if config.training.chunked_loss and (objective or config.training.metrics):
        own = "objective" if objective else "metrics"
        chunk = config.training.chunked_loss
        yield f"--training.chunked_loss {chunk} with --training.{own}, which needs all logits: leave one out"
    yield from _best(config)


def _best(config: Config) -> Iterator[str]:
    """Yields faults of a metric of mpjax; the names of a user's metrics are known only with the data."""
    best = config.loop.best
    if (name := best.removeprefix("test/")) != best:
        yield f"--loop.best {best}: metrics are named without test/; write --loop.best {name}"
    elif best and best not in BEST and not (config.training.objective or config.training.metrics):
        near = difflib.get_close_matches(best, BEST, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield (
            f"--loop.best {best}: there is no such metric; {hint}mpjax has {', '.join(BEST)}, and those of "
            "--training.metrics of your own"
        )


_WITH_CLASSES = ("classification", "text_classification", "segmentation")


def _classes(config: Config) -> Iterator[str]:
    """Yields faults of the settings for classes, which a loss without classes would ignore."""
    objective, weights, ignored = config.training.objective, config.training.class_weights, config.data.ignore_index
    if weights:
        shown = f"--training.class_weights {' '.join(map(str, weights))}"
        if objective:
            yield f"{shown}: --training.objective has its own loss; leave one out, and weigh classes in yours"
        elif config.task not in _WITH_CLASSES:
            yield f"{shown}: is for {', '.join(_WITH_CLASSES)}, not for --task {config.task}; leave it out"
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            yield f"{shown}: wanted finite weights of 0 or more, at least one of them positive"
    if ignored and config.task != "segmentation":
        shown = f"--data.ignore_index {' '.join(map(str, ignored))}"
        if config.task not in _WITH_CLASSES:
            yield f"{shown}: is for {', '.join(_WITH_CLASSES)}, not for --task {config.task}; leave it out"
        for name in ("objective", "metrics"):
            if getattr(config.training, name):
                yield (
                    f"{shown} with --training.{name}, which would be given ignored labels as classes; drop these "
                    "examples from the data"
                )


_TOGETHER = "--distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I"


def _processes(distributed: Distributed) -> Iterator[str]:
    coordinator, processes, process = distributed.coordinator, distributed.processes, distributed.process
    given = bool(coordinator), processes > 0, process >= 0
    alone = processes == 1 and process in (-1, 0)
    if not 0 < distributed.timeout < math.inf:
        yield f"--distributed.timeout is {distributed.timeout}: wanted a positive number of seconds"
    if any(given) and not all(given) and not alone:
        shown = f"coordinator {coordinator or 'not set'}, processes {processes}, process {process}"
        yield f"--distributed: {shown}: wanted all three, {_TOGETHER}, or none"
    elif all(given) and process >= processes:
        yield f"--distributed.process is {process} of {processes}: wanted a number from 0 to {processes - 1}"
    host, _, port = coordinator.rpartition(":")
    if coordinator and not (host and port.isdecimal() and 0 < int(port) < 65536):
        yield f"--distributed.coordinator is {coordinator!r}: wanted HOST:PORT, as in 10.0.0.1:1234"


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def wrong_types(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each setting with a value of another type: the value, and the wanted type.

    Args:
      settings: a dataclass of settings, whose fields may be sections.
      prefix: the name of the section with a dot, for messages.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(value) and type(value) is hint:
            yield from wrong_types(value, f"{prefix}{name}.")
        elif wanted := _wanted(hint, value):
            yield f"--{prefix}{name} is {value!r} ({type(value).__name__}): wanted {wanted}"


def _wanted(hint: Any, value: Any) -> str:
    """The wanted type of a field in words; empty if the value has it."""
    if get_origin(hint) is Annotated:
        parser = hint.__metadata__[0]
        kind = "a tuple, " if parser.is_instance(()) else "a dict, " if parser.is_instance({}) else ""
        return "" if parser.is_instance(value) else f"{kind}{parser.metavar}"
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"
    if hint in _NAMES:
        return "" if is_a(hint, value) else _NAMES[hint]
    return "" if isinstance(value, hint) else f"a {hint.__name__}"
