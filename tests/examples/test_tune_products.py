"""examples/tune_products.py: the products of a run as programs to time, and from timings to rules."""

import dataclasses
import functools
import importlib.util
import pathlib
import shlex
import types

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.commands import make_task
from mpjax.config import Config, Model, Precision, Training, load_config
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.precision import PolicyReport, PolicyRow, as_dtype
from mpjax.training import plan_precision


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "tune_products.py"
SPEC = importlib.util.spec_from_file_location("tune_products", EXAMPLE)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)
Timed, Timing = example.Timed, example.Timing

SLOW, FAST = Timing((2.0,) * 4, (1.0,) * 4), Timing((1.0,) * 4, (1.0,) * 4)
ONE = (1.0,) * 8

SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 4 --report.no_tensorboard --report.no_plot
""")

SETTINGS = {
    "xception": {"width": 4, "depth": 1},
    "vit_ti16": {"width": 8, "depth": 2, "heads": 2, "patch": 4, "dropout": 0.1},
    "mlp": {"width": 4},
}


@functools.cache
def products(name, remat="none", size=4, **precision):
    rules = dict(rule.split("=") for rule in precision.pop("rules", "").split(";") if rule)
    plan = plan_precision(Precision(**{"policy": "mixed_float16", **precision}, rules=rules))
    config = dataclasses.replace(Config(), model=Model(name=name, **SETTINGS[name]), training=Training(remat=remat))
    task = make_task(config, plan, labelled_images(3, (8, 8, 1)))
    batch = {
        "image": jax.ShapeDtypeStruct((size, 8, 8, 1), jnp.uint8),
        "label": jax.ShapeDtypeStruct((size,), jnp.int32),
    }
    return example.products_of(task, plan.policy, batch)


class TestProducts:
    def test_are_the_layers_that_multiply_in_the_order_of_the_model(self):
        assert [(product.path, product.type) for product in products("mlp")] == [
            ("layers/0", "Linear"),
            ("layers/1", "Linear"),
            ("head", "Linear"),
        ]

    @pytest.mark.slow
    def test_convolutions_per_channel_are_products_of_their_own(self):
        paths = [product.path for product in products("xception")]
        assert {"stem/conv1", "blocks/3/convs/2/depthwise", "blocks/3/convs/2/pointwise", "head"} <= set(paths)
        assert len(paths) == 2 + 4 * 5 + 6 + 4 + 1

    @pytest.mark.slow
    def test_attention_is_one_product_with_the_layers_in_it(self):
        assert [product.path for product in products("vit_ti16")] == [
            "patches",
            *(f"blocks/{i}/{part}" for i in range(2) for part in ("attention", "mlp/up", "mlp/down")),
            "head",
        ]

    @pytest.mark.slow
    def test_with_equal_programs_are_one_kind(self):
        kinds = example.kinds_of(products("xception"))
        kinds = {first.path: [other.path for other in others] for first, *others in kinds}
        middle = [f"blocks/3/convs/{i}/depthwise" for i in range(3)]
        assert kinds[middle[0]] == [*middle[1:], "blocks/4/conv1/depthwise", "blocks/4/conv2/depthwise"]
        assert kinds["stem/conv1"] == []

    @pytest.mark.slow
    @pytest.mark.parametrize("settings", [{}, {"remat": "full", "policy": "O1"}])
    def test_run_forward_and_backward_in_both_dtypes_between_neighbours_in_half(self, settings):
        product = products("xception", **settings)[0]
        for program, dtype in ((product.half, "float16"), (product.full, "float32")):
            rows = mpjax.audit(program.run, *program.inputs).operations
            computed = {str(row.dtype): row.count for row in rows if row.operation in example.PRODUCTS}
            assert computed == {dtype: 3}
            inputs = sorted((shape.shape, str(shape.dtype)) for shape in program.inputs[0])
            assert inputs == [((3, 3, 1, 4), "float32"), ((4, 8, 8, 1), "float16")]
            output, (gradients,) = jax.eval_shape(program.run, *program.inputs)
            assert (output.shape, str(output.dtype)) == ((4, 8, 8, 4), "float16")
            assert sorted((g.shape, str(g.dtype)) for g in gradients) == inputs

    def test_have_texts_without_addresses(self):
        texts = [[(p.half.text, p.full.text) for p in products.__wrapped__("mlp")] for _ in range(2)]
        assert texts[0] == texts[1]
        assert products("mlp", size=4)[0].half.text != products("mlp", size=5)[0].half.text

    def test_that_a_rule_decides_are_left_out(self):
        assert [product.path for product in products("mlp", rules="layers/*=float32")] == ["head"]

    @pytest.mark.slow
    def test_in_which_a_rule_decides_a_layer_are_left_out(self):
        assert "blocks/0/attention" not in [p.path for p in products("vit_ti16", rules="blocks/0/*/key=float32")]

    @pytest.mark.slow
    def test_run_on_arrays_that_are_not_zero(self):
        program = products("vit_ti16")[1].half
        arrays = [example.arrays_like(shapes) for shapes in program.inputs]
        output, (gradients,) = jax.jit(program.run)(*arrays)
        assert all(bool(jnp.isfinite(x).all()) for x in (output, *gradients))
        assert all(bool(jnp.any(x != 0)) for x in (output, *arrays[0]))


@pytest.mark.parametrize(
    ("half", "faster"),
    [
        ((1.2,) * 8, True),
        ((1.1,) * 8, False),  # no more than the margin
        ((0.5,) * 8, False),
        ((1.2,) * 6 + (1.0,) * 2, True),  # a quarter of the rounds may have been disturbed
        ((1.2,) * 5 + (1.0,) * 3, False),
        ((9.0,) * 3 + (1.0,) * 5, False),  # a large mean is not enough
    ],
)
def test_float32_is_faster_if_it_is_by_the_margin_in_three_quarters_of_the_rounds(half, faster):
    assert Timing(half, ONE).faster_by(0.1) == faster


def test_rounds_are_compared_one_by_one_so_that_a_slow_machine_slows_both():
    drifting = tuple(float(2**n) for n in range(8))
    assert Timing(tuple(1.2 * s for s in drifting), drifting).faster_by(0.1)
    assert Timing(tuple(1.2 * s for s in drifting), drifting).gain == pytest.approx(1.2)


def test_programs_take_turns_and_each_may_go_first(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(example, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def program(name, seconds):
        def run():
            calls.append(name)
            clock[0] += seconds

        return run

    timing = example.side_by_side(program("half", 0.002), program("full", 0.1), rounds=3)
    assert timing.half == pytest.approx((0.002,) * 3)
    assert timing.full == pytest.approx((0.1,) * 3)
    assert timing.gain == pytest.approx(0.02)
    # Once to warm up, once to see how often two milliseconds fit into four, then in turns.
    assert calls == ["half", "full", "half", "full", "full", *["half"] * 4, "full", "full", "half", "half"]


def report(*paths, **ruled):
    half, full = as_dtype("float16"), as_dtype("float32")
    rows = [PolicyRow(path, "Conv", full, half, "policy") for path in paths]
    return PolicyReport([*rows, *(PolicyRow(path, "Conv", full, full, rule) for path, rule in ruled.items())])


@pytest.mark.parametrize(
    ("slow", "fast", "norms", "rules"),
    [
        (["stem"], ["head"], [], ["stem"]),
        ([], ["stem", "head"], [], []),
        (
            ["blocks/0/conv1/depthwise", "blocks/1/conv2/depthwise", "conv1/depthwise"],
            ["blocks/0/conv1/pointwise", "stem/conv1"],
            [],
            ["*/depthwise"],
        ),
        (["blocks/0/conv1", "blocks/1/conv2"], ["blocks/1/conv1"], [], ["blocks/0/conv1", "*/conv2"]),
        (["a/0", "b/1"], ["c"], [], ["a/0", "b/1"]),
        (["x/block"], ["y/block/conv"], [], ["x/block"]),  # `*/block` would be for all in it
        (["a/attention"], ["head"], ["b/attention/norm"], ["*/attention"]),  # norms are in float32 anyway
        (["list[0]"], ["list0"], [], ["list[[]0]"]),
    ],
)
def test_rules_cover_what_is_slower_in_half_precision_and_nothing_else(slow, fast, norms, rules):
    timed = [Timed(tuple(slow), SLOW), Timed(tuple(fast), FAST)]
    chosen = example.rules_of(timed, report(*slow, *fast, **dict.fromkeys(norms, "type:norm")))
    assert list(chosen.items()) == [(pattern, "float32") for pattern in rules]


@pytest.mark.parametrize(("ratio", "slower"), [(1.05, False), (1.2, True)])
def test_a_tenth_slower_is_slower(ratio, slower):
    assert Timed(("a",), Timing((ratio,) * 4, (1.0,) * 4)).slower_in_half == slower


def tuned(*timings, flags=""):
    """Tunes a small run by a clock that shows these timings: of the two layers, the head, then the step."""
    shown = iter(timings)

    def clock(half, full):
        jax.block_until_ready((half(), full()))
        return next(shown)

    rules = example.tune(load_config([*SMALL, *shlex.split(flags)]), clock)
    assert list(shown) == []
    return rules


@pytest.mark.slow
def test_rules_that_make_the_step_faster_are_those_to_train_with(capsys):
    rules = tuned(FAST, SLOW, Timing((0.030,) * 4, (0.024,) * 4), flags="--precision.rules layers/0 float32")
    assert rules == {"layers/0": "float32", "head": "float32"}
    assert capsys.readouterr().out.splitlines() == [
        "2 kinds of products, in half precision and in float32:",
        "  layers/1: 1000 ms and 1000 ms (Linear)",
        "  head: 2000 ms and 1000 ms, slower in half precision (Linear)",
        "a step without and with 'head' in float32: 30 ms and 24 ms, 1.25 times as fast",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("half", [(0.0302,) * 4, (9.0, 9.0, 0.03, 0.03)])
def test_rules_that_make_the_step_no_faster_are_dropped(half, capsys):
    assert tuned(FAST, FAST, SLOW, Timing(half, (0.03,) * 4)) == {}
    assert capsys.readouterr().out.endswith("no faster: no rules\n")


def test_nothing_slower_needs_no_step(capsys):
    assert tuned(FAST, FAST, FAST) == {}
    assert capsys.readouterr().out.endswith("none is slower in half precision: no rules\n")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--precision.policy float32", "computes in float32: write a policy that computes in half precision"),
        ("--model.scan_blocks", "write --model.no_scan_blocks"),
        ("--distributed.processes 2", "leave out --distributed"),
    ],
)
def test_a_run_without_anything_to_time_is_refused(flags, says):
    with pytest.raises(UsageError, match=says):
        tuned(flags=flags)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["module", "autocast"])
def test_the_program_times_by_the_clock_and_prints_rules_that_a_run_takes(mode, capsys, monkeypatch):
    monkeypatch.setattr(example, "MARGIN", -1.0)  # every product is slower, and the step is faster
    monkeypatch.setattr(example, "GAIN", -1.0)
    example.main(["--rounds", "2", *SMALL, "--precision.mode", mode])
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "train with --precision.rules head float32 layers/0 float32 layers/1 float32"
    load_config([*SMALL, *shlex.split(last.removeprefix("train with "))])
