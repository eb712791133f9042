"""Dtypes: spellings, ranges, what widens to what, and which device is slow in what."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.errors import UsageError
from mpjax.precision import as_dtype, float_range, is_floating, require_x64, slow_half_reason, widest


def device(platform, capability=None):
    return types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="Tesla P100")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("float16", "float16"),
        ("f16", "float16"),
        ("FP16", "float16"),
        (" B-Float_16 ", "bfloat16"),
        ("bf16", "bfloat16"),
        ("full", "float32"),
        ("f32", "float32"),
        ("double", "float64"),
        (jnp.bfloat16, "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
    ],
)
def test_a_dtype_is_read_from_any_spelling(spec, name):
    assert as_dtype(spec).name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flaot16", "unknown dtype 'flaot16'.*did you mean 'float16'"),
        ("half", "'half' differs from device to device: write 'float16' or 'bfloat16'"),
        ("tomato", "wanted one of float16, bfloat16, float32, float64$"),
        (np.int32, "a policy cannot use dtype int32"),
        (jnp.float8_e4m3fn, "a policy cannot use dtype float8_e4m3fn"),
        (None, "not a dtype: None"),
        (object(), "not a dtype"),
    ],
)
def test_an_unknown_dtype_is_an_error_that_says_what_to_write(spec, message):
    with pytest.raises(UsageError, match=message):
        as_dtype(spec)


@pytest.mark.parametrize(
    ("leaf", "answer"),
    [
        (np.zeros(1, np.float16), True),
        (jnp.zeros(1, jnp.bfloat16), True),
        (jax.ShapeDtypeStruct((1,), jnp.float32), True),
        (np.zeros(1, np.int8), False),
        (np.zeros(1, bool), False),
        (jax.random.key(0), False),
        (jnp.zeros(1, jnp.complex64), False),
        (1.0, False),
        ("float32", False),
        (None, False),
    ],
)
def test_only_arrays_of_real_numbers_are_floating(leaf, answer):
    assert is_floating(leaf) is answer


@pytest.mark.parametrize(
    ("dtypes", "name"),
    [
        (("float16", "bfloat16"), "float32"),
        (("float16", "float16"), "float16"),
        (("bfloat16", "float32"), "float32"),
        (("float32", "float64"), "float64"),
        (("float16", "bfloat16", "float16"), "float32"),
    ],
)
def test_the_widest_dtype_holds_them_all_also_under_strict_promotion(dtypes, name):
    assert widest(*map(as_dtype, dtypes)) == np.dtype(name)


@pytest.mark.parametrize(
    ("dtypes", "name"),
    [
        (("float8_e4m3fn", "float8_e4m3fn"), "float8_e4m3fn"),
        (("float8_e4m3fn", "float8_e5m2"), "bfloat16"),
        (("float8_e8m0fnu", "float16"), "float32"),
        (("float4_e2m1fn", "bfloat16"), "bfloat16"),
        (("float8_e5m2", "float32"), "float32"),
    ],
)
def test_dtypes_of_eight_bits_or_less_that_jax_does_not_promote_have_a_widest_too(dtypes, name):
    found = widest(*dtypes)
    assert found == jnp.dtype(name)
    for dtype in (dtype for dtype in map(jnp.dtype, dtypes) if dtype.itemsize == 1):
        every = np.arange(2 ** jnp.finfo(dtype).bits, dtype=np.uint8).view(dtype).astype(np.float32)
        np.testing.assert_array_equal(every.astype(found).astype(np.float32), every)


def test_float64_without_64_bit_jax_is_refused():
    require_x64("float32", "float16")
    with pytest.raises(UsageError, match="jax_enable_x64"):
        require_x64("float32", "float64")
    with jax.enable_x64(True):
        require_x64("float64")


@pytest.mark.parametrize(
    ("name", "largest", "smallest_normal", "smallest_subnormal", "epsilon"),
    [
        ("float16", 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
        ("bfloat16", 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7),
        ("float32", 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23),
    ],
)
def test_ranges(name, largest, smallest_normal, smallest_subnormal, epsilon):
    band = float_range(name)
    assert (band.largest, band.smallest_normal) == (largest, smallest_normal)
    assert (band.smallest_subnormal, band.epsilon) == (smallest_subnormal, epsilon)


@pytest.mark.parametrize(
    ("dtype", "where", "reason"),
    [
        ("float32", device("cpu"), None),
        ("float64", device("gpu", "6.0"), None),
        ("float16", device("cpu"), "no fast float16"),
        ("bfloat16", device("cpu"), "no fast bfloat16"),
        ("bfloat16", device("tpu"), None),
        ("float16", device("tpu"), "use mixed_bfloat16"),
        ("float16", device("gpu", "7.0"), None),
        ("float16", device("gpu", "6.1"), "Tesla P100 .compute capability 6.1. has no fast float16: it needs 7.0"),
        ("bfloat16", device("gpu", "7.5"), "no fast bfloat16: it needs 8.0"),
        ("bfloat16", device("gpu", "12.0"), None),
        ("float16", device("gpu", "gfx942"), None),
        ("float16", types.SimpleNamespace(platform="METAL"), None),
    ],
)
def test_a_device_that_is_slow_in_half_precision_says_so(dtype, where, reason):
    said = slow_half_reason(dtype, where)
    if reason is None:
        assert said is None
    else:
        assert said is not None
        assert re.search(reason, said)
