"""Checksums of arrays, computed where an array is: on its devices, or on the host for a NumPy array.

After Fletcher, "An Arithmetic Checksum for Serial Transmissions", 1982. A word is an element of the array, read as an
unsigned integer; an element of 8 bytes is two words. The first sum adds the words. The second adds the words times
their positions, which count from 1 to 4,093 and start again. Both are modulo 2^32. A single changed word changes the
first sum. Swapped words change the second.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_PERIOD = 4093  # a prime, so that the distance of swapped blocks is rarely a multiple of it
_PLACES = np.arange(1, _PERIOD + 1, dtype=np.uint32)


def checksums_of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Computes a text for each array, by name, with its dtype, its shape and both sums in hexadecimal.

    The text of six ones is `float32[2, 3] 7d00000035800000`. It waits for the arrays, but does not copy them to the
    host. All processes that hold shards of the arrays have to call this together.
    """
    # One at a time: concurrent programs over several devices can deadlock if the host has fewer threads than devices.
    sums = {name: jax.block_until_ready(_sums(array)) for name, array in arrays.items()}
    return {name: _text(arrays[name], *np.asarray(pair)) for name, pair in sums.items()}


def damaged(arrays: Mapping[str, Any], checksums: Mapping[str, str]) -> list[str]:
    """Lists, sorted, the names of arrays that do not have their checksum, or that `arrays` or `checksums` lacks.

    NumPy arrays are summed on the host, and all others as by `checksums_of`.
    """
    on_host = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    computed = {name: _text(array, *_on_host(array)) for name, array in on_host.items()}
    computed |= checksums_of({name: array for name, array in arrays.items() if name not in on_host})
    return sorted(name for name in computed.keys() | checksums.keys() if computed.get(name) != checksums.get(name))


def digest_of(about: Mapping[str, Any]) -> str:
    """Computes the SHA-256 of a description (JSON values by name), its entry `digest` left out, in hexadecimal."""
    text = json.dumps({name: value for name, value in about.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sums(array) -> jax.Array:
    """Computes both sums of an array on its devices; for an array of several processes, replicated to all of them."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        mesh = cast(NamedSharding, array.sharding).mesh
        whole = NamedSharding(mesh, PartitionSpec())  # replicated, so that every process can read it
        return jax.jit(_on_device, out_shardings=whole)(array)
    return _alone(array)


def _on_device(array) -> jax.Array:
    """Computes both sums of one array, uint32 [2]: of its words, and of its words times their positions."""
    array = jnp.asarray(array)
    words = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    words = jax.lax.bitcast_convert_type(words, _WORDS[words.dtype.itemsize]).astype(jnp.uint32)
    # No reshape to one axis: it would gather an array that is sharded along any axis but the first.
    places = _places([_along(words.shape, axis) for axis in range(words.ndim)], words.shape)
    return jnp.stack([jnp.sum(words, dtype=jnp.uint32), jnp.sum(words * places, dtype=jnp.uint32)])


def _along(shape: Sequence[int], axis: int) -> jax.Array:
    """Makes a uint32 array of `shape` with the index of each word along `axis`, modulo the period."""
    if shape[axis] <= 2**32:
        return jax.lax.broadcasted_iota(jnp.uint32, shape, axis) % jnp.uint32(_PERIOD)
    with jax.enable_x64(True):
        index = jax.lax.broadcasted_iota(jnp.uint64, shape, axis)
        return (index % jnp.uint64(_PERIOD)).astype(jnp.uint32)


def _places(along: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """Computes the position of each word of an array in row-major order, from 1 to the period and then again from 1.

    `along` has the indices of the words along each axis of `shape`, modulo the period.
    """
    # The position itself can be 2^32 or more, which uint32 does not hold. The sum of these products is far below.
    strides = [math.prod(shape[axis + 1 :]) % _PERIOD for axis in range(len(shape))]
    terms = [index * jnp.uint32(stride) for index, stride in zip(along, strides, strict=True)]
    return sum(terms, jnp.zeros((), jnp.uint32)) % jnp.uint32(_PERIOD) + jnp.uint32(1)


_alone = jax.jit(_on_device)


def _on_host(array: np.ndarray) -> tuple[int, int]:
    """Computes the two sums of `_on_device` with NumPy."""
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{min(array.dtype.itemsize, 4)}")
    whole = words[: len(words) // _PERIOD * _PERIOD].reshape(-1, _PERIOD)
    columns = whole.sum(axis=0, dtype=np.uint32)  # a column has the same position in each row
    rest = words[whole.size :]
    columns[: len(rest)] += rest
    return int(columns.sum(dtype=np.uint32)), int((columns * _PLACES).sum(dtype=np.uint32))


def _text(array, total: int, weighted: int) -> str:
    return f"{np.dtype(array.dtype).name}{list(array.shape)} {int(total):08x}{int(weighted):08x}"
