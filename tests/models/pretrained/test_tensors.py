"""Safetensors files: shapes and dtypes at once, numbers when asked for."""

import ml_dtypes
import numpy as np
import pytest

from mpjax.errors import UsageError
from mpjax.models.pretrained.tensors import open_tensors


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
        (b"nonsense", "is no safetensors file, or is damaged"),
        (b"", "is no safetensors file, or is damaged"),
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
