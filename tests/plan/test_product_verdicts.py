"""What is said of a product."""

import dataclasses

import numpy as np
import pytest

from mpjax.plan import (
    CONSTANT,
    NOWHERE,
    UNCLEAR,
    CompiledProduct,
    Module,
    PairedProduct,
    Target,
    TracedProduct,
    rows_of_products,
    rows_of_recipe,
)
from mpjax.precision import AskedDtypes
from mpjax.precision.float8 import FLOAT8, MXFP8, ROWWISE


GPU, CPU = Target("NVIDIA H200", "gpu", tensorfloat32=True), Target("this CPU", "cpu")
ASKED = TracedProduct("product", Module("up", False), True, ("float16", "float16"), "float16", 8, 4)
RUN = CompiledProduct(
    "product", Module("up", False), True, ("float16", "float16"), "float32", "float16", "Triton", 8, 4
)


def of(
    asked: TracedProduct | None = ASKED,
    run: CompiledProduct | None = RUN,
    *,
    policy: str | AskedDtypes | None = "float16",
    target=GPU,
    note="",
    traced=True,
    rounds=(),
):
    if isinstance(policy, str):
        policy = AskedDtypes(np.dtype(policy))
    (row,) = rows_of_products(
        [PairedProduct(asked, run, note)], lambda path: policy, target, traced=traced, rounds=rounds
    )
    return row


def runs(dtype, **changes):
    return dataclasses.replace(RUN, **{"operands": (dtype, dtype), "result": result_of(dtype)} | changes)


def asks(dtype, **changes):
    return dataclasses.replace(ASKED, **{"operands": (dtype, dtype), "result": result_of(dtype)} | changes)


def result_of(dtype):
    return {"tensorfloat32": "float32"}.get(dtype, "bfloat16" if dtype.startswith("float8") else dtype)


def test_as_asked():
    row = of()
    assert (row.path, row.direction, row.kind, row.asked, row.operands) == (
        "up",
        "forward",
        "product",
        *["float16"] * 2,
    )
    assert (row.verdict, row.reason, row.count) == ("as asked", "", 1)


@pytest.mark.parametrize(
    ("asked", "found"), [("float16", "float32"), ("float8_e4m3fn", "float32"), ("float8_e4m3fn", "bfloat16")]
)
def test_a_cpu_that_widens_half_precision_can_do_no_other(asked, found):
    row = of(asks(asked), runs(found), policy=None, target=CPU)
    assert (row.verdict, row.device_limit) == ("wider", True)
    assert row.reason == f"XLA computes {asked} products of a CPU in {found}"


def test_what_xla_widens_elsewhere_is_no_limit_of_the_device():
    row = of(run=runs("float32"))
    assert (row.verdict, row.device_limit, row.reason) == ("wider", False, "XLA computes it in float32")


def test_what_the_function_widens_is_told_apart_also_on_a_cpu():
    row = of(asks("float32"), runs("float32"), target=CPU)
    assert (row.verdict, row.device_limit) == ("wider", False)
    assert row.reason == "the function itself computes it in float32"
    assert of(asks("float32"), runs("float32"), policy=None, target=CPU).verdict == "as asked"


def test_float32_on_tensor_cores_is_narrower_and_the_reason_says_what_to_write():
    row = of(asks("float32"), runs("tensorfloat32"), policy="float32")
    assert row.verdict == "narrower"
    assert 'jax.config.update("jax_default_matmul_precision", "highest")' in row.reason


@pytest.mark.parametrize("target", [CPU, GPU])
def test_what_the_function_itself_computes_in_fewer_bits_is_narrower_whatever_the_device_widens(target):
    row = of(asks("bfloat16"), runs("float32"), policy="float32", target=target)
    assert (row.asked, row.operands, row.verdict, row.device_limit) == ("float32", "float32", "narrower", False)
    assert row.reason == "the function itself computes it in bfloat16"
    row = of(asks("float32", result="bfloat16"), runs("float32"), policy="float32", target=target)
    assert row.reason == "the function itself rounds the result to bfloat16"


def test_an_operand_that_was_rounded_on_its_way_is_narrower_unless_the_policy_names_that_dtype():
    asked = asks("float32", rounded=("bfloat16",))
    row = of(asked, runs("float32"), policy="float32", rounds=("float32",))
    assert (row.verdict, row.reason) == ("narrower", "the function itself rounds an operand to bfloat16")
    assert of(asked, runs("float32"), policy="float32", rounds=("float32", "bfloat16")).verdict == "as asked"
    assert of(asked, runs("float32"), policy=None).verdict == "as asked"
    assert of(dataclasses.replace(asked, kept=True), runs("float32"), policy="float32").verdict == "as asked"
    quantised = asks("bfloat16", rounded=("float8_e4m3fn",))
    row = of(quantised, runs("bfloat16"), policy="bfloat16", rounds=("float32", "bfloat16"))
    assert (row.verdict, row.reason) == ("narrower", "the function itself rounds an operand to float8_e4m3fn")


def test_a_quantised_product_is_asked_for_in_float8_without_a_policy():
    row = of(asks("float8_e4m3fn", quantised=True), runs("bfloat16"), policy=None)
    assert (row.asked, row.verdict) == ("float8_e4m3fn", "wider")
    assert row.reason == "quantised to float8_e4m3fn and widened again: the product itself is in bfloat16"


def test_sums_in_half_precision_and_a_result_rounded_too_early_are_narrower():
    assert of(run=runs("float16", accumulation="float16")).reason == "adds up in float16"
    row = of(asks("float16", result="float32"), runs("float16"))
    assert row.reason == "rounds the result to float16; the function asks for float32"
    assert row.verdict == "narrower"


def test_a_quantised_product_is_narrower_under_a_policy_without_float8():
    row = of(asks("float8_e4m3fn", quantised=True), runs("bfloat16"), policy="bfloat16")
    assert (row.asked, row.verdict) == ("bfloat16", "narrower")
    assert row.reason == "the function itself quantises it to float8_e4m3fn"


BF16, E4M3, E5M2 = np.dtype("bfloat16"), "float8_e4m3fn", "float8_e5m2"


def test_a_layer_that_is_to_multiply_in_float8_and_does_not_is_wider():
    row = of(asks("bfloat16"), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8, required=True))
    assert (row.asked, row.verdict) == (E4M3, "wider")
    assert row.reason == "the function itself computes it in bfloat16"
    backward = {"module": Module("up", True)}
    row = of(asks("bfloat16", **backward), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8, required=True))
    assert (row.direction, row.asked, row.verdict) == ("backward", f"{E4M3} x {E5M2}", "wider")
    assert of(asks(E4M3), runs(E4M3), policy=AskedDtypes(BF16, FLOAT8, required=True)).verdict == "as asked"


def test_a_layer_that_is_not_to_multiply_in_float8_and_does_is_narrower():
    row = of(asks(E4M3), runs(E4M3), policy=AskedDtypes(BF16, refused=True))
    assert (row.asked, row.verdict) == ("bfloat16", "narrower")
    assert row.reason == f"the function itself computes it in {E4M3}"


def test_float8_of_a_layer_with_the_users_own_product_and_products_that_a_recipe_leaves_alone_are_as_asked():
    assert of(asks(E4M3), runs(E4M3), policy=AskedDtypes(BF16, users_product=True)).verdict == "as asked"
    assert of(asks("bfloat16"), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8)).verdict == "as asked"


@pytest.mark.parametrize("policy", [AskedDtypes(BF16), AskedDtypes(BF16, unknown=True)])
def test_float8_without_a_recipe_is_narrower_whether_or_not_the_module_is_known(policy):
    row = of(asks(E4M3), runs(E4M3), policy=policy)
    assert (row.asked, row.verdict, row.reason) == (
        "bfloat16",
        "narrower",
        f"the function itself computes it in {E4M3}",
    )


def test_a_gradient_in_the_dtypes_of_another_recipe_is_not_as_asked():
    backward = {"module": Module("up", True)}
    both = {"operands": (E4M3, E5M2)}
    asked, run = dataclasses.replace(ASKED, **backward, **both), dataclasses.replace(RUN, **backward, **both)
    assert of(asked, run, policy=AskedDtypes(BF16, FLOAT8)).verdict == "as asked"
    row = of(asked, run, policy=AskedDtypes(BF16, MXFP8))
    assert (row.asked, row.verdict) == (E4M3, "narrower")
    again = asks(E4M3, recomputed=True, **backward)
    assert of(again, runs(E4M3, **backward), policy=AskedDtypes(BF16, FLOAT8)).verdict == "as asked"


@pytest.mark.parametrize(("target", "run"), [(CPU, "float32"), (GPU, E4M3)])
def test_a_layer_that_was_made_for_a_recipe_of_coarser_scales_is_narrower_and_of_finer_ones_wider(target, run):
    def verdict(policy):
        row = of(asks(E4M3), runs(run), policy=policy, target=target)
        return row.verdict, row.reason

    says = "the layer was made to multiply by {}, and the policy asks for {}"
    assert verdict(AskedDtypes(BF16, ROWWISE, required=True, applied=FLOAT8)) == (
        "narrower",
        says.format("float8", "float8_rowwise"),
    )
    assert verdict(AskedDtypes(BF16, FLOAT8, required=True, applied=ROWWISE)) == (
        "wider",
        says.format("float8_rowwise", "float8"),
    )


@pytest.mark.parametrize("by", ["cuDNN block-scaled", "cuBLASLt MX"])
def test_scales_of_blocks_are_known_by_what_multiplies_them(by):
    for recipe, verdicts in {MXFP8: ("as asked", "narrower"), FLOAT8: ("wider", "as asked")}.items():
        policy = AskedDtypes(BF16, recipe)
        assert (
            of(asks(E4M3), runs(E4M3, by=by), policy=policy).verdict,
            of(asks(E4M3), runs(E4M3), policy=policy).verdict,
        ) == verdicts


def test_blocks_that_a_cpu_multiplies_out_are_a_limit_of_the_device():
    asked = asks(E4M3, quantised=True, blocks=True)
    row = of(asked, runs("float32"), policy=AskedDtypes(BF16, MXFP8, required=True), target=CPU)
    assert (row.verdict, row.device_limit) == ("wider", True)
    row = of(asks(E4M3), runs("float32"), policy=AskedDtypes(BF16, MXFP8), target=CPU)
    assert (row.verdict, row.reason) == (
        "narrower",
        "its operands have no scale for each block, and the policy asks for mxfp8",
    )


def test_a_product_that_might_be_by_a_recipe_says_that_its_module_is_not_known():
    row = of(asks("bfloat16"), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8, unknown=True))
    assert (row.verdict, row.note) == ("as asked", "a product by float8 would be as asked too: its module is not known")


def test_a_recipe_that_no_product_is_in_is_missing_and_on_a_cpu_without_a_trace_unknown():
    row = of(asks("bfloat16"), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8))

    def missing(recipe, *products, target=GPU, traced=True):
        return [(each.kind, each.verdict) for each in rows_of_recipe(recipe, products, target, traced=traced)]

    assert missing(FLOAT8, row) == missing(FLOAT8) == [("recipe", "missing")]
    assert missing(FLOAT8, row, target=CPU, traced=False) == [("recipe", "unknown")]
    assert missing(None, row) == []
    assert missing(FLOAT8, row, dataclasses.replace(row, asked=E4M3)) == []


def test_what_is_not_differentiated_is_free_of_the_policy_if_anything_is():
    optimizer = asks("float32", differentiated=False)
    exact = runs("float32")
    both = rows_of_products(
        [PairedProduct(ASKED, RUN), PairedProduct(optimizer, exact)],
        lambda path: AskedDtypes(np.dtype("float16")),
        GPU,
        traced=True,
    )
    assert [(row.direction, row.asked, row.verdict) for row in both] == [
        ("forward", "float16", "as asked"),
        ("other", "float32", "as asked"),
    ]
    assert of(optimizer, exact).verdict == "wider"
    rows = rows_of_products(
        [PairedProduct(ASKED, RUN), PairedProduct(optimizer, runs("tensorfloat32"))],
        lambda path: AskedDtypes(np.dtype("float16")),
        GPU,
        traced=True,
    )
    assert (rows[1].operands, rows[1].verdict) == ("tensorfloat32", "as asked")
    assert of(asks("float32", kept=True), exact).verdict == "as asked"


def test_what_cannot_be_told_is_unknown():
    assert [of(run=None, note=note).verdict for note in (NOWHERE, UNCLEAR, CONSTANT)] == [
        "missing",
        "unknown",
        "unknown",
    ]
    assert of(None).reason == "no such product is in the traced function"
    assert of(None, traced=False).verdict == "as asked"
    assert of(None, policy=None, traced=False).verdict == "unknown"
    assert of(None, dataclasses.replace(RUN, named=False), traced=False).verdict == "unknown"


def test_equal_rows_are_counted():
    (row,) = rows_of_products([PairedProduct(ASKED, RUN)] * 3, lambda path: None, GPU, traced=True)
    assert row.count == 3
