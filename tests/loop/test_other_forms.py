"""What a checkpoint has in another form than a state wants it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.loop import with_moments, with_weights, without_field


BFLOAT16, FLOAT16 = jnp.dtype("bfloat16"), np.dtype("float16")
REST, MASTER = "opt_state/inner_state/compensation/w", "opt_state/inner_state/masters/w"
MOMENT = "opt_state/inner_state/0/mu/w"


def like(dtype, shape=(2,)):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_weight_and_its_compensation_are_a_master_weight():
    saved = {"params/w": np.array([1, -2], BFLOAT16), REST: np.array([2**-12, 2**-11], BFLOAT16)}
    found = with_weights(saved, {})
    np.testing.assert_array_equal(found[MASTER], np.float32([1 + 2**-12, -2 + 2**-11]))
    assert set(found) == {"params/w", REST, MASTER}


@pytest.mark.parametrize(
    ("saved", "rest"),
    [
        ({"params/w": np.float32([1 + 2**-12, 3])}, [2**-12, 0]),
        ({"params/w": np.array([1, 3], BFLOAT16), MASTER: np.float32([1 + 2**-12, 3])}, [2**-12, 0]),
        # Rounded by chance: what it lacks is more than half the distance to the next number.
        ({"params/w": np.array([1 + 2**-7, 3], BFLOAT16), MASTER: np.float32([1 + 2**-12, 3])}, [2**-12 - 2**-7, 0]),
        ({"params/w": np.array([1, 3], BFLOAT16)}, [0, 0]),
    ],
    ids=["float32", "masters", "stochastic masters", "bfloat16"],
)
def test_what_a_half_precision_weight_lacks_is_its_compensation(saved, rest):
    found = with_weights(saved, {REST: like(BFLOAT16)})[REST]
    assert found.dtype == BFLOAT16
    np.testing.assert_array_equal(found.astype(np.float32), np.float32(rest))


def test_the_compensation_of_another_dtype_is_computed_anew():
    saved = {"params/w": np.array([1 + 2**-10, 3], FLOAT16), REST: np.array([2**-14, 0], FLOAT16)}
    found = with_weights(saved, {REST: like(BFLOAT16)})[REST]
    np.testing.assert_array_equal(found.astype(np.float32), np.float32([2**-10 + 2**-14, 0]))


def test_what_is_there_stays():
    saved = {"params/w": np.array([1, 3], BFLOAT16), REST: np.array([2**-12, 0], BFLOAT16)}
    assert with_weights(saved, {REST: like(BFLOAT16)})[REST] is saved[REST]
    assert with_moments(saved, {"params/w": like(BFLOAT16)}) == saved


def test_a_plain_moment_becomes_float8_and_is_plain_again():
    plain = np.float32([[1, -0.5, 0, 0.25]])
    grouped = with_moments({MOMENT: plain}, {f"{MOMENT}/values": like("float8_e4m3fn", (1, 4))})
    assert str(grouped[f"{MOMENT}/values"].dtype) == "float8_e4m3fn"
    assert float(grouped[f"{MOMENT}/scale"][0, 0]) == 1
    del grouped[MOMENT]
    found = with_moments(grouped, {MOMENT: like("float32", (1, 4))})[MOMENT]
    np.testing.assert_allclose(found, plain, rtol=0.07)


@pytest.mark.parametrize("field", ["dynamic_codes", "linear_codes"])
@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("uint8", 254)])
def test_a_plain_moment_becomes_codes_and_is_plain_again(field, dtype, largest):
    plain = np.float32([[4, 2, 0, 1]])
    coded = with_moments({MOMENT: plain}, {f"{MOMENT}/{field}": like(dtype, (1, 4))})
    codes, scale = coded[f"{MOMENT}/{field}"], coded[f"{MOMENT}/group_scale"]
    assert (str(codes.dtype), codes[0, 0], codes[0, 2], float(scale[0, 0])) == (dtype, largest, 0, 4.0)
    del coded[MOMENT]
    np.testing.assert_allclose(with_moments(coded, {MOMENT: like("float32", (1, 4))})[MOMENT], plain, rtol=0.02)


def test_a_float8_moment_becomes_codes_and_codes_of_one_table_those_of_the_other():
    plain = np.float32([[4, -2, 0, 1]])
    other = with_moments({MOMENT: plain}, {f"{MOMENT}/values": like("float8_e4m3fn", (1, 4))})
    for field in ("dynamic_codes", "linear_codes", "dynamic_codes"):
        del other[MOMENT]
        other = with_moments(other, {f"{MOMENT}/{field}": like("int8", (1, 4))})
        other = {name: array for name, array in other.items() if name.endswith((field, "group_scale"))}
        np.testing.assert_allclose(with_moments(other, {MOMENT: like("float32", (1, 4))})[MOMENT], plain, rtol=0.1)
        other[MOMENT] = plain


def test_a_parameter_may_have_the_name_of_a_field():
    plain = np.float32([[1, -0.5, 0, 0.25]])
    moment = "opt_state/inner_state/0/mu/norm/scale"
    stored = with_moments({moment: plain}, {f"{moment}/dynamic_codes": like("int8", (1, 4))})
    del stored[moment]
    np.testing.assert_allclose(with_moments(stored, {moment: like("float32", (1, 4))})[moment], plain, rtol=0.02)


def test_the_arrays_of_a_stored_moment_are_of_one_moment():
    fields = ("/values", "/scale", "/power", "/dynamic_codes", "/linear_codes", "/group_scale", "")
    assert [without_field(f"{MOMENT}{end}") for end in fields] == [MOMENT] * 7
