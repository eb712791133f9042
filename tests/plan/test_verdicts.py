"""What is said of a product, a sum and an update."""

import dataclasses

import numpy as np

from mpjax.plan.asked import Asked
from mpjax.plan.pairing import CONSTANT, NOWHERE, UNCLEAR, Pair
from mpjax.plan.runs import Run, Target
from mpjax.plan.source import Module
from mpjax.plan.sums_and_updates import Sum
from mpjax.plan.verdicts import rows_of_products, rows_of_sums, rows_of_updates
from mpjax.precision.float8.recipes import FLOAT8
from mpjax.precision.product_dtypes import AskedDtypes


GPU, CPU = Target("NVIDIA H200", "gpu", tensorfloat32=True), Target("this CPU", "cpu")
ASKED = Asked("product", Module("up", False), True, ("float16", "float16"), "float16", 8, 4)
OUTSIDE = Module("", False)
RUN = Run("product", Module("up", False), True, ("float16", "float16"), "float32", "float16", "Triton", 8, 4)


def of(
    asked: Asked | None = ASKED,
    run: Run | None = RUN,
    *,
    policy: str | AskedDtypes | None = "float16",
    target=GPU,
    note="",
    traced=True,
):
    if isinstance(policy, str):
        policy = AskedDtypes(np.dtype(policy))
    (row,) = rows_of_products([Pair(asked, run, note)], lambda path: policy, target, traced=traced)
    return row


def runs(dtype, **changes):
    return dataclasses.replace(RUN, operands=(dtype, dtype), **changes)


def asks(dtype, **changes):
    return dataclasses.replace(ASKED, operands=(dtype, dtype), **changes)


def test_as_asked():
    row = of()
    assert (row.path, row.direction, row.kind, row.asked, row.operands) == (
        "up",
        "forward",
        "product",
        *["float16"] * 2,
    )
    assert (row.verdict, row.reason, row.count) == ("as asked", "", 1)


def test_a_cpu_that_widens_half_precision_can_do_no_other():
    row = of(run=runs("float32"), target=CPU)
    assert (row.verdict, row.device_limit) == ("wider", True)
    assert row.reason == "XLA computes float16 products of a CPU in float32"


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


def test_a_quantised_product_is_asked_for_in_float8_whatever_the_policy():
    row = of(asks("float8_e4m3fn", quantised=True), runs("bfloat16"), policy="bfloat16")
    assert (row.asked, row.verdict) == ("float8_e4m3fn", "wider")
    assert row.reason == "quantised to float8_e4m3fn and widened again: the product itself is in bfloat16"


def test_sums_in_half_precision_and_a_result_rounded_too_early_are_narrower():
    assert of(run=runs("float16", accumulation="float16")).reason == "adds up in float16"
    row = of(asks("float16", result="float32"), runs("float16"))
    assert row.reason == "rounds the result to float16; the function asks for float32"
    assert row.verdict == "narrower"


BF16, E4M3 = np.dtype("bfloat16"), "float8_e4m3fn"


def test_a_layer_that_is_to_multiply_in_float8_and_does_not_is_wider():
    row = of(asks("bfloat16"), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8, required=True))
    assert (row.asked, row.verdict) == (E4M3, "wider")
    assert row.reason == "the function itself computes it in bfloat16"
    backward = {"module": Module("up", True)}
    row = of(asks("bfloat16", **backward), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8, required=True))
    assert (row.direction, row.asked, row.verdict) == ("backward", f"float8_e5m2 x {E4M3}", "wider")
    assert of(asks(E4M3), runs(E4M3), policy=AskedDtypes(BF16, FLOAT8, required=True)).verdict == "as asked"


def test_a_layer_that_is_not_to_multiply_in_float8_and_does_is_narrower():
    row = of(asks(E4M3), runs(E4M3), policy=AskedDtypes(BF16, refused=True))
    assert (row.asked, row.verdict) == ("bfloat16", "narrower")
    assert row.reason == f"the function itself computes it in {E4M3}"


def test_float8_of_the_users_own_and_products_that_a_recipe_leaves_alone_are_as_asked():
    assert of(asks(E4M3), runs(E4M3), policy="bfloat16").verdict == "as asked"
    assert of(asks("bfloat16"), runs("bfloat16"), policy=AskedDtypes(BF16, FLOAT8)).verdict == "as asked"


def test_what_is_not_differentiated_is_free_of_the_policy_if_anything_is():
    optimizer = asks("float32", differentiated=False)
    exact = runs("float32")
    both = rows_of_products(
        [Pair(ASKED, RUN), Pair(optimizer, exact)], lambda path: AskedDtypes(np.dtype("float16")), GPU, traced=True
    )
    assert [(row.direction, row.asked, row.verdict) for row in both] == [
        ("forward", "float16", "as asked"),
        ("other", "float32", "as asked"),
    ]
    assert of(optimizer, exact).verdict == "wider"
    rows = rows_of_products(
        [Pair(ASKED, RUN), Pair(optimizer, runs("tensorfloat32"))],
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
    (row,) = rows_of_products([Pair(ASKED, RUN)] * 3, lambda path: None, GPU, traced=True)
    assert row.count == 3


def added(dtype, *, named=True, written=True, dims=(4, 2), module=OUTSIDE):
    return Sum("all-reduce", module, named, written, ((dtype, dims),))


def sums(asked, found, least="float32", like=()):
    rows = rows_of_sums(asked, found, least=least, parameters=like)
    return [(row.asked, row.operands, row.verdict) for row in rows]


def test_sums_over_devices_are_compared_with_the_function_and_the_policy():
    assert sums(["float32"], [added("float32")]) == [("float32", "float32", "as asked")]
    assert sums(["float32"], [added("float16")]) == [("float32", "float16", "narrower")]
    assert sums(["bfloat16"], [added("bfloat16")]) == [("float32", "bfloat16", "narrower")]
    assert sums(["bfloat16"], [added("bfloat16")], least="bfloat16") == [("bfloat16", "bfloat16", "as asked")]
    assert sums(["float32"], []) == [("float32", "", "missing")]


def test_a_sum_that_the_compiler_added_is_judged_as_a_gradient_if_it_has_a_parameters_shape():
    backward = Module("up", True)
    own = added("float16", written=False, module=backward)
    assert sums([], [own], like=[(2, 4)]) == [("float32", "float16", "narrower")]
    assert sums([], [own], like=[(3, 4)]) == [("float16", "float16", "as asked")]


def test_a_sum_without_a_name_is_the_functions_if_it_asks_for_one_in_that_dtype_else_the_compilers():
    nameless = added("float16", named=False, written=False)
    assert sums(["float32"], [added("float32", named=False, written=False)]) == [("float32", "float32", "as asked")]
    assert sums([], [nameless], like=[(2, 4)]) == [("float32", "float16", "narrower")]
    assert sums(["float32"], [added("float32"), nameless], like=[(2, 4)])[1] == ("float32", "float16", "narrower")


def test_gradients_that_xla_joined_in_one_array_are_found_by_their_number_or_unknown():
    joined = added("bfloat16", named=False, written=False, dims=(14,))
    assert sums([], [joined], like=[(2, 4), (3, 2)]) == [("float32", "bfloat16", "narrower")]
    assert sums([], [joined], like=[(2, 4), (3, 3)]) == [("bfloat16", "bfloat16", "unknown")]
    wide = added("float32", named=False, written=False, dims=(14,))
    assert sums([], [wide]) == [("float32", "float32", "as asked")]


def test_a_sum_in_a_dtype_that_the_function_does_not_ask_for_is_unknown_and_without_a_trace_the_policys():
    assert sums(["float32"], [added("float32"), added("float16")])[1] == ("float32", "float16", "unknown")
    assert sums([], [added("float32")]) == [("float32", "float32", "as asked")]
    assert sums([], [added("float16")]) == [("float32", "float16", "narrower")]
    assert sums([], [added("float16")], least=None) == [("", "float16", "unknown")]


def test_updates_are_as_asked_or_wider_or_told():
    rows = rows_of_updates(
        {
            "same": ("float32", frozenset({"float32"})),
            "wide": ("float16", frozenset({"float32"})),
            "narrow": ("float32", frozenset({"float32", "float16"})),
            "frozen": ("float32", frozenset()),
            "dark": ("float32", None),
        }
    )
    assert [(row.path, row.operands, row.verdict) for row in rows] == [
        ("same", "float32", "as asked"),
        ("wide", "float32", "as asked"),
        ("narrow", "float16", "narrower"),
        ("dark", "", "unknown"),
    ]
