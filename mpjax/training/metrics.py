"""The metrics of a step as one array, so that a step hands out, and the host fetches, a single buffer."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32, is_floating, widest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Metrics(Mapping[str, jax.Array]):
    """A mapping from name to scalar; `jax.device_get(metrics)` fetches all of it at once.

    Attributes:
      array: float32 (or wider) [number of metrics].
      names: one for each value.
    """

    array: jax.Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.names:
            raise KeyError(name)
        return self.array[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def pack(metrics: Mapping[str, jax.Array]) -> Metrics:
    """Scalars of any dtype as one `Metrics`; counters stay exact up to 2^24."""
    dtype = widest(FLOAT32, *(value.dtype for value in metrics.values() if is_floating(value)))
    return Metrics(jnp.stack([value.astype(dtype) for value in metrics.values()]), tuple(metrics))
