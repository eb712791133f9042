"""Collects statistics of a step by layer and direction: read in the compiled program, combined on the host."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.formats import NARROW, range_of
from mpjax.diagnosis.measurements import stacked
from mpjax.diagnosis.readings import EXPONENTS, Marks, Measured, Site
from mpjax.precision.dtypes import FLOAT32


class Layer(NamedTuple):
    """Statistics of a module, or of a parameter, in one direction. Fractions are between 0 and 1.

    Attributes:
      path: the path of the module or parameter; for values outside all modules, the file name and line, `train.py:31`.
      direction: "forward" (activations), "backward" (cotangents), "gradient" (of a parameter, unscaled) or "update".
      dtype: the narrowest dtype of the values read.
      largest: largest finite magnitude; 0 if there is none.
      mean: mean of the finite magnitudes; 0 if there are none.
      non_finite: fraction of values that are inf or nan.
      overflow: fraction that rounding turned into inf.
      underflow: fraction that rounding turned into zero; for an update, the fraction that is not zero but leaves the
        parameter unchanged.
      subnormal: fraction of values that are not zero, but smaller than the smallest normal number of their dtype.
      histogram: [88] counts by exponent (`EXPONENTS`) of a sample of at most 1,024 values of each result.
    """

    path: str
    direction: str
    dtype: np.dtype
    largest: float
    mean: float
    non_finite: float
    overflow: float
    underflow: float
    subnormal: float
    histogram: tuple[int, ...]

    @property
    def counts(self) -> dict[int, int]:
        """The counts of the histogram that are not zero, by exponent: key e counts the magnitudes in [2^e, 2^(e+1))."""
        return {exponent: count for exponent, count in zip(EXPONENTS, self.histogram, strict=True) if count}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """Statistics of one step, on the device. `by_layer` combines them into readable rows.

    Attributes:
      array: float32 [number of sites, 95], one row for each site: six sums (`_SUMS`), the largest magnitude, and the
        histogram.
      sites: where each row was measured (module, direction, operation), in program order.
    """

    array: jax.Array
    sites: tuple[Site, ...] = dataclasses.field(metadata={"static": True})

    def by_layer(self) -> list[Layer]:
        """Fetches the statistics to the host and combines them by module or parameter, and by direction.

        Values outside all modules are combined by file and line. The layers are in the order in which the program first
        computes a value of theirs.
        """
        indices_by_layer: dict[tuple[str, str], list[int]] = {}
        for index, site in enumerate(self.sites):
            path = site.path or pathlib.Path(site.source).name
            indices_by_layer.setdefault((path, site.direction), []).append(index)
        rows = np.asarray(jax.device_get(self.array), np.float64)
        return [self._layer(path, rows[indices], indices) for path, indices in indices_by_layer.items()]

    def _layer(self, key: tuple[str, str], rows: np.ndarray, indices: list[int]) -> Layer:
        """Combines rows of `array`.

        Args:
          key: the path and the direction of the layer.
          rows: float64 [number of indices, 95].
          indices: the indices of these rows in `sites`.
        """
        size, total, non_finite, overflow, underflow, subnormal = rows[:, : len(_SUMS)].sum(0)
        finite = max(size - non_finite, 1.0)
        return Layer(
            *key,
            dtype=min((self.sites[index].dtype for index in indices), key=lambda dtype: dtype.itemsize),
            largest=float(rows[:, len(_SUMS)].max()),
            mean=float(total / finite),
            non_finite=float(non_finite / max(size, 1.0)),
            overflow=float(overflow / max(size, 1.0)),
            underflow=float(underflow / max(size, 1.0)),
            subnormal=float(subnormal / max(size, 1.0)),
            histogram=tuple(rows[:, len(_SUMS) + 1 :].sum(0).astype(int).tolist()),
        )


_SAMPLE = 1024
_SUMS = ("size", "total", "non_finite", "overflow", "underflow", "subnormal")


class LayerRecorder:
    """Records statistics of the results of a step while the step is traced, in place of a `Recorder`.

    Attributes:
      sites: where each recorded value is computed, in program order.
    """

    def __init__(self):
        self.sites: list[Site] = []
        self._found: list[Measured] = []
        self._samples: list[jax.Array] = []

    def observe(self, site: Site, wide, exact, low, marks: Sequence[Marks]) -> Marks:
        """Records the statistics of the result `low`, which is `exact` after rounding.

        Overflow and underflow are counted only if `site.dtype` is half precision or float8. `wide` and `marks` are
        ignored. Always returns the default `Marks()`, because this recorder does not track which inputs a value depends
        on.
        """
        rounded = site.dtype in NARROW
        self.add(site, low, underflow=(low == 0) & (exact != 0) if rounded else None, exact=exact if rounded else None)
        return Marks()

    def add(self, site: Site, values, *, underflow=None, exact=None) -> None:
        """Records the statistics of an array, computed in float32.

        Args:
          site: where the values are computed; its dtype decides which values are subnormal.
          values: an array of any shape.
          underflow: a boolean mask of the values that count as underflow; None counts none.
          exact: the values before rounding, to count overflow; None counts none.
        """
        values = values.astype(FLOAT32)
        finite = jnp.isfinite(values)
        size = jnp.where(finite, jnp.abs(values), 0.0)
        none = jnp.zeros_like(finite)
        flags = (
            ~finite,
            none if exact is None else ~finite & jnp.isfinite(exact),
            none if underflow is None else underflow,
            (size > 0) & (size < range_of(site.dtype).smallest_normal),
        )
        self.sites.append(site)
        self._found.append(_summed(size, flags))
        flat = jnp.ravel(size)
        self._samples.append(flat[:: max(1, -(-flat.size // _SAMPLE))])

    def within(self) -> "LayerRecorder":
        """Makes an empty recorder for the body of a loop. `extend` then adds the body's statistics to this recorder."""
        return LayerRecorder()

    def extend(self, sites: Sequence[Site], measured: Sequence[Measured]) -> None:
        """Adds the sites in the body of a loop, and their statistics over all iterations."""
        self.sites += sites
        self._found += measured
        self._samples += [jnp.zeros(0)] * len(sites)

    @property
    def measured(self) -> list[Measured]:
        """The statistics of each site: a dict of float32 arrays "sums" [6], "largest" [] and "histogram" [88].

        `_SUMS` names the sums. The dicts are in the order of `sites`, and computed anew at each access.
        """
        if not self._found:
            return []
        histograms = _histograms(self._samples)
        return [
            {**fields, "histogram": fields.get("histogram", 0.0) + histogram}
            for fields, histogram in zip(self._found, histograms, strict=True)
        ]

    def stacked(self) -> Measured:
        """The dict of `measured` with the values of all sites stacked along a new first axis; empty without sites."""
        return stacked(self.measured)

    def layers(self) -> Layers:
        """Stacks the statistics of all sites into one array [number of sites, 95]."""
        rows = [jnp.concatenate([m["sums"], m["largest"][None], m["histogram"]]) for m in self.measured]
        width = len(_SUMS) + 1 + len(EXPONENTS)
        return Layers(jnp.stack(rows) if rows else jnp.zeros((0, width), FLOAT32), tuple(self.sites))


def _summed(size, flags: Sequence) -> Measured:
    """Computes the entries "sums" [6] and "largest" [] of `LayerRecorder.measured`, in one pass over the array.

    "sums" has the number of values, the sum of their magnitudes, and the number of True values in each of the four
    flags.

    Args:
      size: the magnitudes, of any shape, with 0 in place of inf and nan.
      flags: four boolean arrays of the same shape.
    """

    def together(a, b):
        *sums, largest = zip(a, b, strict=True)
        return *(x + y for x, y in sums), jnp.maximum(*largest)

    columns = [size, *(flag.astype(np.int32) for flag in flags), size]
    zeros = [column.dtype.type(0) for column in columns]
    # Row by row first, because float32 cannot count beyond 2^24 and loses small numbers added to a large sum.
    *sums, largest = jax.lax.reduce(columns, zeros, together, range(min(1, max(size.ndim - 1, 0)), size.ndim))
    sums = [jnp.sum(column).astype(FLOAT32) for column in sums]
    return {"sums": jnp.stack([jnp.float32(size.size), *sums]), "largest": jnp.max(largest, initial=0.0)}


def _histograms(samples: Sequence[jax.Array]) -> jax.Array:
    """Counts the positive values of each sample by exponent, all in one program: float32 [number of samples, 88].

    Values outside of `EXPONENTS` count in the first or the last bin.
    """
    sizes = np.array([sample.size for sample in samples])
    numbers = np.repeat(np.arange(len(samples)), sizes)
    values = jnp.concatenate(samples)
    bins = jnp.clip(jnp.frexp(values)[1] - 1 - EXPONENTS.start, 0, len(EXPONENTS) - 1)
    counts = jnp.zeros((len(samples), len(EXPONENTS)), FLOAT32)
    return counts.at[numbers, bins].add((values > 0).astype(FLOAT32))
