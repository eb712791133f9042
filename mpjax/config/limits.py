"""Checks that settings are valid and do not contradict each other, and reports all faults in one error.

The range of a single setting is part of its type (`setting_types.py`).
"""

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mpjax.config.choices import AUTO, BEST, DIFFUSION_MODELS, MODELS, SETTINGS_OF_RULES, TABULAR
from mpjax.config.paths import expanded
from mpjax.config.schema import Config, Data, Distributed, Optimizer, Training
from mpjax.config.setting_types import out_of_range, words, wrong_types
from mpjax.config.tasks import OF_NUMBERS, WITH_CLASSES
from mpjax.config.unread import as_words, unread_by_task
from mpjax.errors import UsageError


def is_auto(config: Config) -> bool:
    """True if the batch size or the number of micro-batches is `auto`; `mpjax.commands.fit.fitted` replaces it."""
    return AUTO in (config.data.batch_size, config.training.accumulate)


def check(config: Config) -> None:
    """Raises UsageError that lists every fault of the settings: wrong types, values out of range, and contradictions.

    Each line has the value and the valid values. Contradictions are checked only if all types are right. A batch size
    or a number of micro-batches that is still `auto` is a fault too.
    """
    require_valid(config, rules=_of_config(config))


def require_types(config: Config) -> None:
    """Calls `check` if a value has a wrong type, as only Python code can set it; otherwise checks nothing.

    The UsageError then lists the values out of range too.
    """
    if any(wrong_types(config)):
        check(config)


def check_distributed(distributed: Distributed) -> None:
    """Raises UsageError like `check`, for the `distributed` section alone."""
    require_valid(distributed, "distributed.", _of_distributed(distributed))


def check_data(data: Data) -> None:
    """Raises UsageError like `check`, for the `data` section alone."""
    require_valid(data, "data.", _of_data(data))


def require_valid(settings: Any, prefix: str = "", rules: Iterable[str] = ()) -> None:
    """Raises UsageError that lists all faults of settings.

    Args:
      settings: a dataclass of settings, whose fields may be sections.
      prefix: the name of the section with a dot, for messages.
      rules: messages about contradictions between settings. They are read only if no setting has a wrong type.
    """
    wrong = [*wrong_types(settings, prefix)]
    if faults := [*wrong, *out_of_range(settings, prefix), *(() if wrong else rules)]:
        raise UsageError("\n".join(faults))


def _of_config(config: Config) -> Iterator[str]:
    yield from _of_data(config.data.for_task(config.task))
    yield from unread_by_task(config)
    yield from _of_targets(config.data)
    yield from _of_numbers(config)
    yield from _of_preference(config)
    yield from _of_embedding(config)
    yield from _of_diffusion(config)
    yield from _others(config)
    yield from _of_distributed(config.distributed)


def _of_targets(data: Data) -> Iterator[str]:
    if twice := [name for name in dict.fromkeys(data.targets) if data.targets.count(name) > 1]:
        yield f"--data.targets {words(data.targets)} names {twice[0]!r} twice: it would count twice; write it once"


def _of_numbers(config: Config) -> Iterator[str]:
    """Yields messages about settings that a regression has alone, and about those that it or several labels lack."""
    training, usual, numbers = config.training, Training(), config.task == "regression"
    for name in ("loss", "huber_delta"):
        if (value := getattr(training, name)) == getattr(usual, name):
            continue
        flag = f"--training.{name} {value}"
        if not numbers:
            yield f"{flag} is for --task regression, not for --task {config.task}; leave it out"
        elif training.objective:
            yield f"{flag}: --training.objective has its own loss; leave one out"
        elif name == "huber_delta" and training.loss != "huber":
            yield f"{flag} is for --training.loss huber, not for {training.loss}; leave it out"
    if config.task not in OF_NUMBERS:
        return
    for name in ("mixup", "cutmix", "mix"):
        if value := getattr(config.data, name):
            yield f"--data.{name} {as_words(value)}: is not for --task {config.task}; leave it out"


def _of_preference(config: Config) -> Iterator[str]:
    """Yields messages about settings that a preference needs, lacks, or has alone."""
    training = config.training
    if config.task != "preference" or training.objective:
        if training.beta != Training().beta:
            reason = "--training.objective has its own loss" if training.objective else "is for --task preference"
            yield f"--training.beta {training.beta}: {reason}; leave it out"
        return
    if not training.lora:
        yield (
            "--task preference compares the model with the one before training, which is the model without its "
            'adapters: write --training.lora with patterns of layers, as in --training.lora "blocks/*"'
        )
    if training.lora_trained:
        yield (
            f"--training.lora_trained {words(training.lora_trained)} with --task preference, which compares the "
            "model with its weights before training: leave it out"
        )
    if training.chunked_loss:
        yield f"--training.chunked_loss {training.chunked_loss} is not for --task preference: leave it out"


def _of_embedding(config: Config) -> Iterator[str]:
    """Yields messages about settings that embeddings, or images and texts, need, lack, or have alone."""
    data, training, usual = config.data, config.training, Training()
    if config.task != "embedding" or training.objective:
        reason = "--training.objective has its own loss" if training.objective else "is for --task embedding"
        for name in ("temperature", "symmetric"):
            if (value := getattr(training, name)) != getattr(usual, name):
                yield f"--training.{name} {'' if value is True else value}".rstrip() + f": {reason}; leave it out"
        if config.task != "image_text" or training.objective:
            return
    for name in ("batch_size", "eval_batch_size"):
        if getattr(data, name) == 1:
            what = "a text with those" if config.task == "embedding" else "an image with the texts"
            yield f"--data.{name} 1: --task {config.task} compares {what} of other examples; wanted at least 2"
    if training.chunked_loss:
        yield f"--training.chunked_loss {training.chunked_loss} is not for --task {config.task}: leave it out"


def _of_diffusion(config: Config) -> Iterator[str]:
    """Yields messages about settings that a diffusion lacks or has alone, and about networks of another task."""
    data, training, usual, name = config.data, config.training, Training(), config.model.name
    diffuses = config.task == "diffusion"
    of_loss = ("drop_label", "min_snr")  # a sampler reads the others, also of a run with its own loss
    for setting in ("prediction", "noise_schedule", *of_loss):
        if (value := getattr(training, setting)) == getattr(usual, setting):
            continue
        if not diffuses:
            yield f"--training.{setting} {value} is for --task diffusion, not for --task {config.task}; leave it out"
        elif training.objective and setting in of_loss:
            yield f"--training.{setting} {value}: --training.objective has its own loss; leave it out"
    if not diffuses:
        if name in DIFFUSION_MODELS and config.task != "own":
            yield f"--model.name {name} is for --task diffusion, not for --task {config.task}: write one or the other"
        return
    if name in MODELS and name not in DIFFUSION_MODELS:
        yield (
            f"--model.name {name} takes no times, as --task diffusion wants: write --model.name "
            f"{' or '.join(DIFFUSION_MODELS)}, or FILE.py:NAME of your own model"
        )
    for setting in ("mean", "std"):
        value = getattr(data, setting)
        if value != getattr(Data(), setting) and set(value) != {0.5}:
            yield (
                f"--data.{setting} {words(value)}: --task diffusion scales images to [-1, 1], from which those "
                "that it draws are scaled back; leave it out"
            )
    for setting in ("mixup", "cutmix", "random_erasing", "randaugment_ops"):
        if value := getattr(data, setting):
            yield (
                f"--data.{setting} {value}: --task diffusion would learn to draw the images that it makes; leave it out"
            )


def _auto(name: str, value: int) -> Iterator[str]:
    if value == AUTO:
        yield f"--{name} auto: train.py and find_lr.py find the number; for other commands, write it"


def _of_data(data: Data) -> Iterator[str]:
    yield from _auto("data.batch_size", data.batch_size)
    if data.crop_edges != "black" and not data.padding:
        yield (
            f"--data.crop_edges {data.crop_edges}: images are not shifted; write --data.crop_padding 2, or leave it out"
        )
    if data.header and not (name := str(data.name)).startswith(("hf:", TABULAR)):
        is_file = name.endswith((".csv", ".tsv")) or any(expanded(name).glob("*.[ct]sv"))
        yield (
            f"--data.header is for csv and tsv files, as in --data.name hf:FILE.tsv, not for --data.name {data.name}; "
            + (f"write --data.name hf:{data.name}" if is_file else "leave it out")
        )
    if data.text_template and "text" in data.columns:
        yield (
            f"--data.text_template and --data.columns text {data.columns['text']}: wanted one; a template may be one "
            f"column, {{{data.columns['text']}}}"
        )
    usual = Data().randaugment_magnitude
    if data.randaugment_magnitude != usual and not data.randaugment_ops:
        yield (
            f"--data.randaugment_magnitude {data.randaugment_magnitude} without --data.randaugment_ops, which is 0: no "
            f"operation is applied; wanted both, or {usual}"
        )
    if data.alternate_flips and not data.flip:
        yield "--data.alternate_flips without --data.flip: no image is flipped; wanted both or none"
    yield from _mix(data)
    if not (data.antialias or data.image_size):
        yield "--data.no_antialias without --data.image_size, which is 0: no image is resized; wanted both or none"


_SMALLEST = 0.001  # that of one example in each block of a mixture (`data/order.py`)


def _mix(data: Data) -> Iterator[str]:
    for name, fraction in data.mix.items():
        if not _SMALLEST <= fraction < 1:
            yield f"--data.mix {name} {fraction}: wanted a share of the training examples, from {_SMALLEST} up to 1"
        if name == data.name:
            yield f"--data.mix {name} {fraction}: that is --data.name, which has the rest of the examples; leave it out"
    # Shares that sum to 0.999 leave a little less than 0.001.
    if data.mix and not (rest := 1 - sum(data.mix.values())) > _SMALLEST * (1 - 1e-9):
        yield (
            f"--data.mix leaves a share of {rest:.3g} to --data.name {data.name}: wanted shares of the others that sum "
            f"to at most {1 - _SMALLEST}"
        )


def _others(config: Config) -> Iterator[str]:
    yield from _auto("training.accumulate", config.training.accumulate)
    yield from _own_parts(config)
    for pattern, factor in config.optimizer.rates.items():
        if not 0 < factor < math.inf:
            yield (
                f"--optimizer.rates {pattern} {factor}: wanted a positive factor; to leave parameters as they are, "
                f"write --training.freeze {pattern}"
            )
    if config.seeds and config.seed != Config().seed:
        shown = " ".join(map(str, config.seeds))
        yield f"--seed {config.seed} with --seeds {shown}: each run has its own; leave out --seed, or write --seed 0"
    yield from _of_other_rules(config.optimizer)


def _of_other_rules(optimizer: Optimizer) -> Iterator[str]:
    """Yields a message for each optimizer setting that is not at its default and that the chosen update rule ignores.

    Only mpjax's own rules are checked; an optimizer of optax is checked elsewhere, against its signature.
    """
    if (rule := str(optimizer.name)) not in SETTINGS_OF_RULES:
        return
    for field in dict.fromkeys(name for names in SETTINGS_OF_RULES.values() for name in names):
        value, usual = getattr(optimizer, field), getattr(Optimizer(), field)
        if value != usual and field not in SETTINGS_OF_RULES[rule]:
            rules = " and ".join(other for other, fields in SETTINGS_OF_RULES.items() if field in fields)
            flag = f"--optimizer.{field}"
            yield f"{flag} {value} is for {rules}, not for --optimizer.name {rule}: leave it out, or write {usual}"


_WITHOUT_SMOOTHING = (
    "segmentation",
    "preference",
    "regression",
    "multilabel",
    "embedding",
    "image_text",
    "diffusion",
)


def _own_parts(config: Config) -> Iterator[str]:
    objective = config.training.objective
    if config.task == "own" and not objective:
        yield "--task own: wanted --training.objective FILE.py:NAME, a function of the loss and the metrics"
    smoothing = config.training.label_smoothing
    if smoothing not in (0.0, Training().label_smoothing) and (objective or config.task in _WITHOUT_SMOOTHING):
        loss = "--training.objective" if objective else f"the loss of {config.task}"
        yield f"--training.label_smoothing {smoothing}: {loss} has none; leave it out"
    yield from _classes(config)
    yield from _lora(config.training)
    if config.training.chunked_loss and (objective or config.training.metrics):
        setting = "objective" if objective else "metrics"
        chunk = config.training.chunked_loss
        yield f"--training.chunked_loss {chunk} with --training.{setting}, which needs all logits: leave one out"
    yield from _best(config)


def _best(config: Config) -> Iterator[str]:
    """Yields a message if `loop.best` begins with `test/`, or names no metric of mpjax and the run has no own metrics.

    Names of a user's metrics are known only when the data is open.
    """
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


def _lora(training: Training) -> Iterator[str]:
    if training.lora:
        if training.freeze:
            yield (
                f"--training.freeze {' '.join(training.freeze)} with --training.lora, which freezes all but adapters: "
                "leave --training.freeze out"
            )
        return
    for field in ("lora_rank", "lora_alpha", "lora_variant", "lora_base", "lora_trained"):
        if (value := getattr(training, field)) != getattr(Training(), field):
            shown = " ".join(value) if isinstance(value, tuple) else value
            yield (
                f"--training.{field} {shown} without --training.lora: there are no adapters; leave it out, or write "
                "--training.lora with patterns of layers"
            )


def _classes(config: Config) -> Iterator[str]:
    """Yields messages about class weights and ignored labels that the task, the objective or the metrics cannot use."""
    objective, weights, ignored = config.training.objective, config.training.class_weights, config.data.ignore_index
    if weights:
        shown = f"--training.class_weights {' '.join(map(str, weights))}"
        if objective:
            yield f"{shown}: --training.objective has its own loss; leave one out, and weigh classes in yours"
        elif config.task not in WITH_CLASSES:
            yield f"{shown}: is for {', '.join(WITH_CLASSES)}, not for --task {config.task}; leave it out"
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            yield f"{shown}: wanted finite weights of 0 or more, at least one of them positive"
    if ignored and config.task != "segmentation":
        shown = f"--data.ignore_index {' '.join(map(str, ignored))}"
        if config.task not in WITH_CLASSES:
            yield f"{shown}: is for {', '.join(WITH_CLASSES)}, not for --task {config.task}; leave it out"
        for name in ("objective", "metrics"):
            if getattr(config.training, name):
                yield (
                    f"{shown} with --training.{name}, which would be given ignored labels as classes; drop these "
                    "examples from the data"
                )


_TOGETHER = "--distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I"


def _of_distributed(distributed: Distributed) -> Iterator[str]:
    coordinator, processes, process = distributed.coordinator, distributed.processes, distributed.process
    is_set = bool(coordinator), processes > 0, process >= 0
    alone = processes == 1 and process in (-1, 0)
    if any(is_set) and not all(is_set) and not alone:
        shown = f"coordinator {coordinator or 'not set'}, processes {processes}, process {process}"
        yield f"--distributed: {shown}: wanted all three, {_TOGETHER}, or none"
    elif all(is_set) and process >= processes:
        yield f"--distributed.process is {process} of {processes}: wanted a number from 0 to {processes - 1}"
    host, _, port = coordinator.rpartition(":")
    if coordinator and not (host and port.isdecimal() and 0 < int(port) < 65536):
        yield f"--distributed.coordinator is {coordinator!r}: wanted HOST:PORT, as in 10.0.0.1:1234"
    elif ":" in host and not (host.startswith("[") and host.endswith("]")):
        yield (
            f"--distributed.coordinator is {coordinator!r}: wanted an address of IPv6 in brackets, and a port, as in "
            "[fd00::1]:1234"
        )
