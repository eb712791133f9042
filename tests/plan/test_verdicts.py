"""What is said of a sum and an update."""

from mpjax.plan.hlo import Module
from mpjax.plan.sums_and_updates import Sum
from mpjax.plan.verdicts import rows_of_sums, rows_of_updates


OUTSIDE = Module("", False)


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


def test_a_parameter_that_the_function_itself_rounds_is_narrower_whatever_the_program_shows():
    found = {name: ("float32", dtypes) for name, dtypes in {"a": frozenset({"float32"}), "b": None}.items()}
    rows = rows_of_updates(found, {"a": "bfloat16", "b": "bfloat16"})
    assert [(row.operands, row.verdict) for row in rows] == [("bfloat16", "narrower")] * 2
    assert rows[0].reason == "the function itself rounds the new parameter to bfloat16"
