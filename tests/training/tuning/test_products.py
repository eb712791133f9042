"""The products of a model as programs of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.commands.learner import make_task
from mpjax.config import Config
from mpjax.config.schema import Model, Precision, Training
from mpjax.data import labelled_images
from mpjax.precision.casting.walk import equations
from mpjax.training.precision_plan import plan_precision
from mpjax.training.tuning.products import PRODUCTS, arrays_like, products_of
from mpjax.training.tuning.tune_products import kinds_of


pytestmark = pytest.mark.slow  # layers are timed and trained


SETTINGS = {
    "xception": {"width": 4, "depth": 1},
    "resnet18": {"width": 4},
    "vit_ti16": {"width": 8, "depth": 2, "heads": 2, "patch": 4, "dropout": 0.1},
    "mlp": {"width": 4},
}
SETTINGS["vit_s16"] = {**SETTINGS["vit_ti16"], "scan_blocks": True}


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
    return products_of(task, plan.policy, batch)


def test_products_are_the_layers_that_multiply_in_the_order_of_the_model():
    assert [(one.path, one.type) for one in products("mlp")] == [
        ("layers/0", "Linear"),
        ("layers/1", "Linear"),
        ("head", "Linear"),
    ]


def test_convolutions_per_channel_are_products_of_their_own():
    paths = [one.path for one in products("xception")]
    assert {"stem/conv1", "blocks/3/convs/2/depthwise", "blocks/3/convs/2/pointwise", "head"} <= set(paths)
    assert len(paths) == 2 + 4 * 5 + 6 + 4 + 1


def test_attention_is_one_product_with_the_layers_in_it():
    assert [one.path for one in products("vit_ti16")] == [
        "patches",
        *(f"blocks/{i}/{part}" for i in range(2) for part in ("attention", "mlp/up", "mlp/down")),
        "head",
    ]


def test_equal_programs_are_one_kind():
    kinds = {one.path: [other.path for other in others] for one, *others in kinds_of(products("xception"))}
    middle = [f"blocks/3/convs/{i}/depthwise" for i in range(3)]
    assert kinds[middle[0]] == [*middle[1:], "blocks/4/conv1/depthwise", "blocks/4/conv2/depthwise"]
    assert kinds["stem/conv1"] == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"remat": "full"}, {"policy": "O1"}])
def test_each_runs_forward_and_backward_in_both_dtypes_between_neighbours_in_half(settings):
    one = products("xception", **settings)[0]
    for program, dtype in ((one.half, "float16"), (one.full, "float32")):
        jaxpr = jax.make_jaxpr(program.run)(*program.inputs)
        computed = [str(eqn.outvars[0].aval.dtype) for _, eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]
        assert computed == [dtype] * 3
        inputs = sorted((shape.shape, str(shape.dtype)) for shape in program.inputs[0])
        assert inputs == [((3, 3, 1, 4), "float32"), ((4, 8, 8, 1), "float16")]
        output, (gradients,) = jax.eval_shape(program.run, *program.inputs)
        assert (output.shape, str(output.dtype)) == ((4, 8, 8, 4), "float16")
        assert sorted((g.shape, str(g.dtype)) for g in gradients) == inputs


def test_a_program_is_known_by_its_text_which_has_no_addresses():
    texts = [[(one.half.text, one.full.text) for one in products.__wrapped__("vit_ti16")] for _ in range(2)]
    assert texts[0] == texts[1]
    assert products("mlp", size=4)[0].half.text != products("mlp", size=5)[0].half.text


def test_what_a_rule_decides_already_is_left_out():
    assert [one.path for one in products("mlp", rules="layers/*=float32")] == ["head"]
    assert "blocks/0/attention" not in [one.path for one in products("vit_ti16", rules="blocks/0/*/key=float32")]


def test_arrays_to_run_a_program_on_are_of_its_shapes_and_not_zero():
    program = products("vit_ti16")[1].half
    arrays = [arrays_like(shapes) for shapes in program.inputs]
    output, (gradients,) = jax.jit(program.run)(*arrays)
    assert all(bool(jnp.isfinite(x).all()) for x in (output, *gradients))
    assert all(bool(jnp.any(x != 0)) for x in (output, *arrays[0]))


def test_of_a_stack_of_blocks_one_is_timed():
    """With the arrays of one block: its programs are those of a block among others."""
    stacked, single = products("vit_s16"), {one.path: one for one in products("vit_ti16")}
    paths = [one.path for one in stacked]
    assert paths == ["patches", *(f"blocks/all/{part}" for part in ("attention", "mlp/up", "mlp/down")), "head"]
    for one in stacked:
        assert one.half.text == single[one.path.replace("all", "0")].half.text
