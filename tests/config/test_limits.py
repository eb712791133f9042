"""Numbers that no run can have are refused by name."""

import dataclasses
import typing

import pytest

from mpjax.config import Config, Data, Distributed, Report, check, load_config
from mpjax.errors import UsageError


def test_the_default_settings_pass():
    check(Config())


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("data.batch_size", "0", "--data.batch_size: wanted auto or a whole number from 1 on, got 0"),
        ("data.eval_batch_size", "-3", "--data.eval_batch_size is -3: wanted 0 or more"),
        ("data.workers", "-1", "--data.workers is -1: wanted 0 or more"),
        ("model.width", "-1", "--model.width is -1: wanted 0 or more"),
        ("model.depth", "-1", "--model.depth is -1: wanted 0 or more"),
        ("precision.patience", "0", "--precision.patience is 0: wanted at least 1"),
        (
            "training.accumulate",
            "auto",
            "--training.accumulate auto: train.py and find_lr.py find the number",
        ),
        ("training.accumulate", "0", "--training.accumulate: wanted auto or a whole number from 1 on, got 0"),
        ("loop.keep", "0", "--loop.keep is 0: wanted at least 1"),
        ("optimizer.learning_rate", "-0.1", "--optimizer.learning_rate is -0.1: wanted 0 or more"),
        ("optimizer.learning_rate", "nan", "--optimizer.learning_rate is nan: wanted 0 or more"),
        ("optimizer.weight_decay", "inf", "--optimizer.weight_decay is inf: wanted 0 or more"),
        ("report.images", "-1", "--report.images is -1: wanted 0 or more"),
        ("seed", "-1", r"--seed is -1: wanted 0 to 2\*\*32 - 1"),
        ("optimizer.momentum", "1", "--optimizer.momentum is 1.0: wanted from 0 up to, not including, 1"),
        ("training.ema", "1.5", "--training.ema is 1.5: wanted from 0 up to, not including, 1"),
        ("training.label_smoothing", "-0.1", "--training.label_smoothing is -0.1: wanted from 0 up to"),
        ("optimizer.layer_decay", "0", "--optimizer.layer_decay is 0.0: wanted above 0, up to 1"),
        ("optimizer.layer_decay", "1.1", "--optimizer.layer_decay is 1.1: wanted above 0, up to 1"),
        ("steps", "0", "--steps is 0: wanted at least one step"),
        ("steps", "0 epochs", "--steps is 0 epochs: wanted at least one step"),
        ("data.header", "label", "--data.header is for csv and tsv files, as in .* not for --data.name digits; leave"),
        ("data.std", "0", r"--data.std is \(0.0,\): wanted positive numbers"),
    ],
)
def test_a_number_out_of_range_is_named(flag, value, says):
    with pytest.raises(UsageError, match=says):
        check(load_config([f"--{flag}={value}"]))


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ("b 0", "--data.mix b 0.0: wanted a share of the training examples, from 0.001 up to 1"),
        ("b 1", "--data.mix b 1.0: wanted a share"),
        ("b nan", "--data.mix b nan: wanted a share"),
        ("b 0.7 c 0.3", "--data.mix leaves a share of .* to --data.name digits: wanted .* that sum to at most 0.999"),
        ("b 0.9 c 0.9", "--data.mix leaves a share of -0.8 to --data.name digits"),
        ("b 0.3337 c 0.6657", "--data.mix leaves a share of 0.0006 to --data.name digits"),
        ("digits 0.5", "--data.mix digits 0.5: that is --data.name, which has the rest of the examples; leave it out"),
    ],
)
def test_shares_of_a_mixture_leave_some_to_the_first_set(mix, says):
    with pytest.raises(UsageError, match=says):
        check(load_config(["--data.mix", *mix.split()]))
    check(load_config(["--data.mix", "b", "0.001", "c", "0.998"]))


def test_a_target_is_named_once():
    table = ["--task", "regression", "--data.name", "tabular:t.csv", "--data.targets"]
    with pytest.raises(UsageError, match="--data.targets x y x names 'x' twice"):
        check(load_config([*table, "x", "y", "x"]))
    check(load_config([*table, "x", "y"]))


def test_a_way_to_resize_needs_a_size():
    with pytest.raises(UsageError, match="--data.no_antialias without --data.image_size, which is 0"):
        check(load_config(["--data.no_antialias"]))
    check(load_config(["--data.no_antialias", "--data.image_size", "224"]))


@pytest.mark.parametrize(
    ("flags", "loss"),
    [
        (["--task", "segmentation"], "the loss of segmentation"),
        (["--training.objective", "mine.py:loss"], "--training.objective"),
    ],
)
def test_label_smoothing_is_for_losses_that_have_it(flags, loss):
    with pytest.raises(UsageError, match=f"--training.label_smoothing 0.2: {loss} has none; leave it out"):
        check(load_config([*flags, "--training.label_smoothing", "0.2"]))
    check(load_config(flags))


@pytest.mark.parametrize(
    ("rule", "flag", "said"),
    [
        ("sgd", "--optimizer.b2=0.99", "--optimizer.b2 0.99 is for adamw and lamb, not for --optimizer.name sgd"),
        ("adamw", "--optimizer.momentum=0.5", "--optimizer.momentum 0.5 is for sgd, not for"),
        ("lamb", "--optimizer.no_nesterov", "--optimizer.nesterov False is for sgd, not for"),
    ],
)
def test_a_setting_of_another_update_rule_is_not_ignored(rule, flag, said):
    with pytest.raises(UsageError, match=said):
        check(load_config([flag, "--optimizer.name", rule]))
    check(load_config(["--optimizer.name", rule]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--training.class_weights 1 -1", "class_weights 1.0 -1.0: wanted finite weights of 0 or more"),
        ("--training.class_weights 1 nan", "class_weights 1.0 nan: wanted finite weights of 0 or more"),
        ("--training.class_weights 0 0", "class_weights 0.0 0.0: wanted finite .* at least one of them positive"),
        ("--training.class_weights 1 --training.objective a.py:b", "--training.objective has its own loss"),
        (
            "--training.class_weights 1 --task language_modeling",
            "audio_classification, not for --task language_modeling",
        ),
        ("--data.ignore_index 0 --task language_modeling", "--data.ignore_index 0: is for classification, .*, not for"),
        ("--data.ignore_index 9 --training.metrics a.py:b", "--data.ignore_index 9 with --training.metrics, which"),
        ("--data.documents apart", "--data.documents apart is for language_modeling, .* not for --task classification"),
    ],
)
def test_settings_of_classes_are_for_losses_that_have_them(flags, said):
    with pytest.raises(UsageError, match=said):
        check(load_config(flags.split()))
    check(load_config(["--task", "segmentation", "--training.class_weights", "0", "2", "--data.ignore_index", "255"]))


def test_a_table_without_hf_is_one_that_lacks_it():
    with pytest.raises(UsageError, match=r"not for --data.name my/all.tsv; write --data.name hf:my/all.tsv$"):
        check(load_config(["--data.header", "label", "text", "--data.name", "my/all.tsv"]))


def test_a_rate_of_nothing_is_freezing():
    with pytest.raises(UsageError, match=r"--optimizer.rates stem/\* 0.0: wanted a positive .*training.freeze stem/\*"):
        check(load_config(["--optimizer.rates", "stem/*", "0"]))


def test_reflected_edges_need_a_shift():
    with pytest.raises(UsageError, match="--data.crop_edges reflect: images are not shifted"):
        check(load_config(["--data.crop_edges", "reflect", "--data.crop_padding", "0"]))
    with pytest.raises(UsageError, match="--data.crop_edges reflect: images are not shifted"):  # `own` has no shift
        check(load_config(["--data.crop_edges", "reflect", "--task", "own", "--training.objective", "f.py:loss"]))
    check(load_config(["--data.crop_edges", "reflect"]))


def test_alternating_flips_need_flips():
    with pytest.raises(UsageError, match="--data.alternate_flips without --data.flip: no image is flipped"):
        check(load_config(["--data.alternate_flips"]))
    check(load_config(["--data.alternate_flips", "--data.flip"]))


@pytest.mark.parametrize(
    ("formats", "shown"), [((), "empty"), (("png", "png"), "png png"), (("gif", "svg"), "gif svg")]
)
def test_plots_have_formats_each_once(formats, shown):
    wanted = f"--report.plot_format is {shown}: wanted one or more of png, pdf, svg, each once"
    with pytest.raises(UsageError, match=wanted):
        check(Config(report=Report(plot_format=formats)))


def test_all_faults_are_named_at_once():
    config = Config()
    config = dataclasses.replace(config, seed=-1, data=dataclasses.replace(config.data, workers=-1))
    with pytest.raises(UsageError) as raised:
        check(config)
    assert str(raised.value).splitlines() == [
        "--seed is -1: wanted 0 to 2**32 - 1",
        "--data.workers is -1: wanted 0 or more",
    ]


def test_types_and_ranges_are_named_at_once():
    with pytest.raises(UsageError) as raised:
        check(Config(seed="1", data=Data(workers=-1, mix=3)))
    assert str(raised.value).splitlines() == [
        "--seed is '1' (str): wanted a whole number",
        "--data.mix is 3 (int): wanted a dict, [STR FLOAT [STR FLOAT ...]]",
        "--data.workers is -1: wanted 0 or more",
    ]


NOT_LIMITED_ALONE = {
    "precision.initial_scale",
    "precision.growth_interval",
    "precision.min_scale",
    "precision.max_scale",
    "precision.hysteresis",
    "precision.tolerance",
    "mesh.context",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "distributed.processes",
    "distributed.process",
}
"""Numbers whose limits other settings or the devices decide: loss scaling, the mesh, the processes."""


def numbers(kind, prefix=""):
    """Yields the name and the type of every setting that is a number."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from numbers(hint, f"{prefix}{name}.")
        elif (typing.get_args(hint) or [hint])[0] in (int, float):
            yield f"{prefix}{name}", hint


def test_every_number_says_its_range():
    without = {name for name, hint in numbers(Config) if typing.get_origin(hint) is not typing.Annotated}
    assert without == NOT_LIMITED_ALONE
    assert len([*numbers(Config)]) > 40


@pytest.mark.parametrize(("name", "hint"), [pair for pair in numbers(Config) if pair[0] not in NOT_LIMITED_ALONE])
def test_no_number_may_be_nan_or_below_minus_one(name, hint):
    section, _, field = name.rpartition(".")
    for value in (float("nan"),) * (typing.get_args(hint)[0] is float) + (-2,):
        settings = getattr(Config(), section) if section else Config()
        changed = dataclasses.replace(settings, **{field: value})
        config = dataclasses.replace(Config(), **{section: changed}) if section else changed
        with pytest.raises(UsageError, match=f"^--{name} is {value}: wanted "):
            check(config)


@pytest.mark.parametrize("count", [2**31, 10**400])
def test_a_number_that_no_array_can_count_is_refused(count):
    with pytest.raises(UsageError, match=f"--data.batch_size is {count}: wanted at most 2,147,483,647"):
        check(Config(data=Data(batch_size=count)))


PLACE = {"coordinator": "10.0.0.1:1234", "processes": 2, "process": 1}


@pytest.mark.parametrize(
    "given", [PLACE, {"processes": 1}, {"processes": 1, "process": 0}, {**PLACE, "processes": 1, "process": 0}]
)
def test_a_place_among_processes_is_complete_or_one_alone(given):
    check(Config(distributed=Distributed(**given)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"process": 0},
            "coordinator not set, processes 0, process 0: wanted all three, --distributed.coo",
        ),
        ({"processes": 2}, "coordinator not set, processes 2, process -1: wanted all three"),
        ({"processes": 1, "process": 3}, "coordinator not set, processes 1, process 3: wanted all three"),
        ({**PLACE, "process": 2}, "--distributed.process is 2 of 2: wanted a number from 0 to 1"),
        ({**PLACE, "coordinator": "somewhere"}, "coordinator is 'somewhere': wanted HOST:PORT, as in 10.0.0.1:1234"),
        ({**PLACE, "coordinator": "somewhere:0"}, "coordinator is 'somewhere:0': wanted HOST:PORT"),
        (
            {**PLACE, "coordinator": "2001:db8::1"},
            "is '2001:db8::1': wanted an address of IPv6 in brackets, and",
        ),
        ({**PLACE, "coordinator": "[2001:db8::1]"}, r"coordinator is '\[2001:db8::1\]': wanted HOST:PORT"),
        ({"timeout": 0}, "--distributed.timeout is 0: wanted a positive number of seconds"),
    ],
)
def test_an_incomplete_place_among_processes_is_an_error(given, says):
    with pytest.raises(UsageError, match=says):
        check(Config(distributed=Distributed(**given)))
