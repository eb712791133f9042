"""Digests of the tensors in a file of weights, by which a run knows its weights again."""

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpjax.models.pretrained.files import find_files, open_tensors
from mpjax.models.pretrained.match import match_arrays


if TYPE_CHECKING:
    from flax import nnx


def digests_of(model: "nnx.Module", path: str | os.PathLike, *, skip: Sequence[str] = ()) -> dict[str, str]:
    """Computes SHA-256 digests, 16 characters of each, of the tensors that `load_pretrained` reads for a model.

    A digest is of the dtype, the shape and the values in the file, whatever the model stores them in.

    Args:
      model: the model, with single blocks (`mpjax.models.scan.one_by_one`); may be abstract.
      path: the file, the folder or the id on the hub.
      skip: patterns of what is not loaded.

    Returns:
      The digest of the tensor of each variable of the model, by path; variables of one fused tensor share its digest.

    Raises:
      UsageError: the files are not there or do not fit the model, as in `load_pretrained`.
    """
    with open_tensors(find_files(path)) as tensors:
        matched = match_arrays(model, tensors, skip=skip).tensors
        by_key = {tensor.key: tensor for tensor in matched.values()}
        digests = {key: _digest(tensor.read()) for key, tensor in by_key.items()}
    return {name: digests[tensor.key] for name, tensor in matched.items()}


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype}{list(array.shape)}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size and array.ndim else array.tobytes())
    return digest.hexdigest()[:16]
