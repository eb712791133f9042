"""Which of two dtypes is wider."""

import pytest

from mpjax.plan import bits_of, compared, narrowest


@pytest.mark.parametrize(
    ("asked", "runs", "verdict"),
    [
        ("float16", "float16", "as asked"),
        ("float16", "float32", "wider"),
        ("float32", "tensorfloat32", "narrower"),
        ("float16", "tensorfloat32", "wider"),
        ("float16", "bfloat16", "narrower"),
        ("bfloat16", "float16", "narrower"),
        ("float8_e4m3fn", "bfloat16", "wider"),
        ("float8_e4m3fn", "float8_e5m2", "narrower"),
        ("float64", "float32", "narrower"),
    ],
)
def test_fewer_bits_of_exponent_or_mantissa_are_narrower(asked, runs, verdict):
    assert compared([asked, asked], [runs, runs]) == verdict


def test_the_order_of_operands_does_not_matter_and_the_worst_one_decides():
    assert compared(["float8_e4m3fn", "float8_e5m2"], ["float8_e5m2", "float8_e4m3fn"]) == "as asked"
    assert compared(["float32", "float32"], ["float32", "bfloat16"]) == "narrower"
    assert compared(["float16", "float16"], ["float16", "float32"]) == "wider"


def test_bits_are_those_of_the_formats():
    assert bits_of("float8_e5m2") == (5, 2)
    assert bits_of("float4_e2m1fn") == (2, 1)
    with pytest.raises(ValueError, match="unknown floating dtype 'int8'"):
        bits_of("int8")


def test_the_narrowest_has_the_fewest_digits():
    assert narrowest(["float32", "bfloat16", "float16"]) == "bfloat16"
