"""Checksums: the same on device and host, and another for anything that changes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.loop import checksums, checksums_of, damaged, digest_of


# One of each width and kind, and more of them.
DTYPES = ["float32", "bfloat16", "bool", "float8_e4m3fn"]
DTYPES += [pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "int32", "uint8", "int8", "uint32")]


SHAPES = [(), (0,), (3,), (2, 5), (4096,), (3, 4099), (4093,), (4094,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_and_host_agree(dtype):
    host = {str(shape): np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype)) for shape in SHAPES}
    assert damaged(host, checksums_of(jax.device_put(host))) == []


def test_eight_byte_numbers_are_two_words():
    with jax.enable_x64(True):
        array = jnp.linspace(0, 1, 5000, dtype=jnp.float64)
        assert damaged({"w": np.asarray(array)}, checksums_of({"w": array})) == []


@pytest.mark.parametrize(
    "shape", [(3, 5), (2**20 + 1, 8193), (2**31 + 9, 4), (7, 2**20 + 1, 1025), (2**32, 2), (2**34,)]
)
def test_the_place_of_a_word_is_its_position_modulo_the_period(shape):
    """Of the last word of an array, whose position may be above 2^32."""
    last = [np.uint32((size - 1) % 4093) for size in shape]
    assert int(checksums._places(last, shape)) == (math.prod(shape) - 1) % 4093 + 1


def test_an_axis_of_more_words_than_uint32_counts_has_indices_of_uint64():
    assert "u64[" in str(jax.make_jaxpr(lambda: checksums._along((2**32 + 1, 2), 0))())
    assert jax.eval_shape(lambda: checksums._along((2**32 + 1, 2), 0)).dtype == jnp.uint32
    assert "u64[" not in str(jax.make_jaxpr(lambda: checksums._along((2**32, 2), 0))())


def test_the_sums_by_hand():
    assert checksums_of({"w": np.array([1, 2, 3], np.int32)}) == {"w": "int32[3] 000000060000000e"}
    assert checksums_of({"w": np.array([-1, 1], np.int32)}) == {"w": "int32[2] 0000000000000001"}


@settings(max_examples=100)
@given(st.integers(0, 3 * 4096 * 4 - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(byte, bit):
    flipped = bytearray(WORDS.tobytes())
    flipped[byte] ^= 1 << bit
    assert damaged({"w": np.frombuffer(bytes(flipped), WORDS.dtype)}, SUMS) == ["w"]


WORDS = np.random.default_rng(0).normal(size=3 * 4096).astype(np.float32)
SUMS = checksums_of({"w": WORDS})


def test_exchanged_words_other_dtypes_shapes_and_names_are_found():
    exchanged = WORDS.copy()
    exchanged[[0, 5000]] = exchanged[[5000, 0]]
    for other in (exchanged, WORDS.view(np.int32), WORDS.reshape(3, 4096)):
        assert damaged({"w": other}, SUMS) == ["w"]
    assert damaged({"v": WORDS}, SUMS) == ["v", "w"]


def test_a_digest_is_of_all_but_itself():
    about = {"a": 1, "b": {"c": [1.5, None]}}
    digest = digest_of(about)
    assert digest_of({**about, "digest": digest}) == digest
    assert digest_of({"b": {"c": [1.5, None]}, "a": 1}) == digest
    assert digest_of({**about, "a": 2}) != digest


def test_programs_over_several_devices_run_one_after_the_other(monkeypatch):
    """Several at a time hang for ever where a host has fewer threads than devices."""
    order = []
    monkeypatch.setattr(checksums, "_sums", lambda array: order.append(("begun", array)) or np.array([1, 2]))
    monkeypatch.setattr(jax, "block_until_ready", lambda pair: order.append("done") or pair)
    checksums_of({"a": np.zeros(1), "b": np.ones(1)})
    assert order == [("begun", 0), "done", ("begun", 1), "done"]
