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


def test_the_arrays_of_a_float8_moment_are_of_one_moment():
    assert [without_field(f"{MOMENT}{end}") for end in ("/values", "/scale", "/power", "")] == [MOMENT] * 4
