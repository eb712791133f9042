"""Arrays on their way: which leaves are arrays, which are cast, and what is known of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.casting import UNKNOWN, Value, cast, cast_like, is_array, split_arrays, values_of


F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (jnp.ones(2), True),
        (np.ones(2, BF16), True),
        (np.float32(1), True),
        (np.ones(2, bool), True),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (np.array(["2020-01-01"], "datetime64[D]"), False),
        (np.timedelta64(1, "s"), False),
        (np.zeros(2, [("a", "f4")]), False),
        (np.zeros(2, "V4"), False),
        (1.0, False),
        (None, False),
        ("a", False),
    ],
)
def test_numbers_of_numpy_and_jax_are_arrays_and_texts_times_and_python_numbers_are_not(leaf, expected):
    assert is_array(leaf) == expected


def test_arrays_are_taken_out_of_a_tree_and_others_put_in_where_they_were():
    arrays, with_arrays = split_arrays({"a": np.float32(1), "b": ("text", jnp.arange(2)), "c": 0.5})
    assert [array.tolist() for array in arrays] == [1.0, [0, 1]]
    assert all(isinstance(array, jax.Array) for array in arrays)
    assert with_arrays(["first", "second"]) == {"a": "first", "b": ("text", "second"), "c": 0.5}
    with pytest.raises(ValueError, match="shorter"):
        with_arrays(["first"])


@pytest.mark.parametrize("given", [jnp.ones(2, F32), jnp.ones(2, BF16), 0.5])
def test_floating_arrays_and_numbers_are_cast(given):
    assert cast(given, F16).dtype == F16


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(jnp.arange(2), F16), (jnp.ones(2, bool), F16), (3, F16), (True, F16), (jnp.ones(2, F32), F32), (0.5, None)],
    ids=["integers", "booleans", "an integer", "a boolean", "of that dtype", "to no dtype"],
)
def test_what_needs_no_cast_or_must_not_have_one_is_the_same_object(given, dtype):
    assert cast(given, dtype) is given


def test_each_array_is_cast_to_the_dtype_of_its_own_neighbour():
    avals = [jax.ShapeDtypeStruct((), dtype) for dtype in (F32, F16, jnp.int32)]
    assert [x.dtype for x in cast_like([jnp.ones((), F16), jnp.ones((), BF16), jnp.ones((), jnp.int32)], avals)] == [
        F32,
        F16,
        jnp.int32,
    ]
    with pytest.raises(ValueError, match="longer"):
        cast_like([jnp.ones(())], avals)


def test_what_is_known_of_arrays_goes_with_them_and_nothing_is_known_unless_given():
    facts = [Value(None, number=0.0, from_numbers=True), UNKNOWN]
    assert values_of(["x", "y"], facts) == [Value("x", number=0.0, from_numbers=True), Value("y")]
    assert values_of(["x", "y"]) == [Value("x"), Value("y")]
    with pytest.raises(ValueError, match="longer"):
        values_of(["x"], facts)


def test_a_fact_for_the_inside_of_a_loop_holds_neither_the_array_nor_its_being_a_peak():
    assert Value("x", number=2.0, peak=True, from_numbers=True).fact == Value(
        None, number=2.0, peak=False, from_numbers=True
    )
