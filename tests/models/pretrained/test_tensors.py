"""Safetensors files: shapes and dtypes at once, numbers when asked for."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from mpjax.errors import UsageError
from mpjax.models.pretrained import DTYPES, open_tensors


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
def test_a_tensor_is_read_as_it_was_written(saved, dtype):
    with open_tensors([saved({"a": np.array([[0, 1], [2, 3]], dtype), "b": np.ones((), dtype)})]) as tensors:
        assert (tensors["a"].shape, tensors["a"].dtype) == ((2, 2), np.dtype(dtype).name)
        assert tensors["a"].read().dtype == dtype
        np.testing.assert_array_equal(tensors["a"].read(), np.array([[0, 1], [2, 3]], dtype))
        assert tensors["b"].read().shape == ()


def test_a_dtype_of_eight_bits_is_named_as_the_format_names_it(saved):
    with open_tensors([saved({"a": np.ones(2, ml_dtypes.float8_e4m3fn)})]) as tensors:
        assert tensors["a"].dtype == "F8_E4M3"


def test_the_tensors_of_several_files_are_one_mapping(saved):
    files = [saved({"a": np.zeros(1)}, "1.safetensors"), saved({"b": np.ones(2)}, "2.safetensors")]
    with open_tensors(files) as tensors:
        assert {key: tensor.read().tolist() for key, tensor in tensors.items()} == {"a": [0], "b": [1, 1]}


def test_a_key_that_two_files_have_is_refused(saved):
    files = [saved({"a": np.zeros(1)}, "1.safetensors"), saved({"a": np.ones(2)}, "2.safetensors")]
    with pytest.raises(UsageError, match="a is in two files"), open_tensors(files):
        pass


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"nonsense", "is not a safetensors file or is damaged"),
        (b"", "is not a safetensors file or is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a pointer of Git LFS.*`git lfs pull`"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, says):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=says), open_tensors([tmp_path / "a.safetensors"]):
        pass


def test_a_file_that_is_cut_short_is_refused(saved):
    path = saved({"a": np.zeros(100)})
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UsageError, match="damaged"), open_tensors([path]):
        pass


WHOLE = save({"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.int64)})
START = 8 + struct.unpack("<Q", WHOLE[:8])[0]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "F8_E4M3", "F4", ""]) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def read_or_named(path):
    said = str(path)
    try:
        with open_tensors([path]) as tensors:
            for tensor in tensors.values():
                if tensor.dtype in DTYPES.values():
                    assert tensor.read().shape == tensor.shape
    except UsageError as error:
        said = str(error)
    assert str(path) in said or "cannot be read" in said


@settings(max_examples=200)
@given(
    st.sampled_from("abc"),
    st.sampled_from(["dtype", "shape", "data_offsets", "more", None]),
    VALUES,
    st.none() | st.sampled_from([0, 2**60, 2**64 - 1, 10**8]),
)
def test_whatever_one_field_of_a_header_is_the_file_is_read_or_named(tmp_path_factory, name, field, value, length):
    header = json.loads(WHOLE[8:START])
    if field is None:
        header[name] = value
    else:
        header.setdefault(name, {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]})[field] = value
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + WHOLE[START:])
    read_or_named(path)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 7)), max_size=3), st.integers(0, len(WHOLE)))
def test_whatever_bits_of_a_file_are_flipped_or_cut_off_it_is_read_or_named(tmp_path_factory, flipped, kept):
    content = bytearray(WHOLE)
    for byte, bit in flipped:
        content[byte] ^= 1 << bit
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(content[: kept if kept % 2 else None])
    read_or_named(path)


@pytest.mark.parametrize("shape", [[0, 2**62], [0, 2**63], [1] * 70])
def test_a_shape_that_no_array_can_have_is_refused(tmp_path, shape):
    size = 0 if 0 in shape else 4
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    with (
        open_tensors([tmp_path / "a.safetensors"]) as tensors,
        pytest.raises(UsageError, match=r"^a of shape \(.* cannot be read \(.*; fetch its file again$"),
    ):
        tensors["a"].read()
