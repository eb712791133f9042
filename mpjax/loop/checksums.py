"""A checksum of each array, computed on the device when it is saved and on the host when it is read.

After Fletcher, "An Arithmetic Checksum for Serial Transmissions", 1982. The first sum adds the words, the second adds
the words times their positions (here with a period of 4,093), both modulo 2^32. A single changed word changes the
first sum. Swapped words change the second.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_PERIOD = 4093  # a prime, so that swapped blocks are rarely a multiple of it apart
_PLACES = np.arange(1, _PERIOD + 1, dtype=np.uint32)


def checksums_of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns dtype, shape and both sums of each array as text. Waits for the arrays, but does not copy them."""
    sums = {name: _on_device(array) for name, array in arrays.items()}
    return {name: _text(arrays[name], *np.asarray(pair)) for name, pair in sums.items()}


def damaged(arrays: Mapping[str, np.ndarray], checksums: Mapping[str, str]) -> list[str]:
    """Returns the names of arrays whose checksum differs, or that only one of `arrays` and `checksums` has."""
    found = {name: _text(array, *_on_host(array)) for name, array in arrays.items()}
    return sorted(name for name in found.keys() | checksums.keys() if found.get(name) != checksums.get(name))


def digest_of(about: Mapping[str, Any]) -> str:
    """Returns the SHA-256 digest of a description (JSON values by name), its `digest` entry left out."""
    text = json.dumps({name: value for name, value in about.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@jax.jit
def _on_device(array) -> jax.Array:
    """Computes both sums of one array, uint32 [2]."""
    array = jnp.asarray(array)
    words = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    words = jax.lax.bitcast_convert_type(words, _WORDS[words.dtype.itemsize]).reshape(-1).astype(jnp.uint32)
    places = jax.lax.iota(jnp.uint32, words.size) % jnp.uint32(_PERIOD) + jnp.uint32(1)
    return jnp.stack([jnp.sum(words, dtype=jnp.uint32), jnp.sum(words * places, dtype=jnp.uint32)])


def _on_host(array: np.ndarray) -> tuple[int, int]:
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{min(array.dtype.itemsize, 4)}")
    whole = words[: len(words) // _PERIOD * _PERIOD].reshape(-1, _PERIOD)
    columns = whole.sum(axis=0, dtype=np.uint32)  # a column has the same position in each row
    rest = words[whole.size :]
    columns[: len(rest)] += rest
    return int(columns.sum(dtype=np.uint32)), int((columns * _PLACES).sum(dtype=np.uint32))


def _text(array, total: int, weighted: int) -> str:
    return f"{np.dtype(array.dtype).name}{list(array.shape)} {int(total):08x}{int(weighted):08x}"
