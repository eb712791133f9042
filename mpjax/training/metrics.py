"""A user's metrics of the test set: checks them on shapes, and sums metrics of clu and metrax over examples."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.config.user_calls import file_of, named_failure
from mpjax.errors import UsageError, failure
from mpjax.training.objective import Batch, Mean, Values
from mpjax.training.user_objective import is_array, kind_of, require_names, require_per_example


if TYPE_CHECKING:
    from mpjax.extend import Metric


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Collected:
    """A metric of `clu` or `metrax`, as arrays that may be added up: of each example, [B, ...], or summed over a set.

    Attributes:
      arrays: the arrays of the metric, float32 or wider.
      name: the name of the metric.
      treedef: the structure of the metric.
      dtypes: the dtypes of its arrays.
    """

    arrays: list[jax.Array]
    name: str = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})
    dtypes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def of_set(self) -> float:
        """Computes the metric of a set from the sums; NaN if it divides Python numbers by zero, as JAX's division does.

        Raises UsageError if `compute` fails in another way, or returns something other than one number.
        """
        arrays = [jnp.asarray(x, dtype) for x, dtype in zip(self.arrays, self.dtypes, strict=True)]
        try:
            return _number_of(self.name, self.treedef.unflatten(arrays))
        except ZeroDivisionError:
            return float("nan")


def checked_metrics(
    metrics: Mapping[str, "Metric"], outputs: Any, batch: Mapping[str, jax.ShapeDtypeStruct], *, taken: Iterable[str]
) -> tuple[Callable[[Any, Batch], Values], ...]:
    """Checks a user's metrics on shapes, and wraps each as `(outputs, batch) -> values`: a dict of values by name.

    Args:
      metrics: functions by name; a value that a function returns alone gets the name of the function.
      outputs: the shapes of the outputs of the objective for `batch`.
      batch: the shapes of a prepared batch.
      taken: the names of the objective's metrics.

    Raises:
      UsageError: a metric fails or returns something else on these shapes, or has the name of another metric or of
        another value of a run. The message names it.
    """
    size = next(iter(batch.values())).shape[0]
    names: list[str] = []
    for flag, function in metrics.items():
        for name in _names(flag, function, outputs, batch, size):
            if name in names or name in taken:
                raise UsageError(f"--training.metrics {flag}: there is a metric {name} already; give it another name")
            names.append(name)
    require_names(names, "--training.metrics")
    return tuple(functools.partial(_values, flag, function) for flag, function in metrics.items())


def _is_collected(value: Any) -> bool:
    """True for a metric of `clu` or `metrax`: an object with the methods `merge` and `compute`."""
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def _named(flag: str, metrics: Any) -> Mapping[str, Any]:
    """Returns a dict of values as it is, and a single value as a dict with the name `flag`."""
    return metrics if isinstance(metrics, Mapping) else {flag: metrics}


def _names(flag: str, function: "Metric", outputs: Any, batch: Any, size: int) -> tuple[str, ...]:
    """Traces a metric on shapes, checks what it returns, and lists the names of its values; UsageError if it fails."""

    def checked(outputs, batch):
        returned = function(outputs, batch)
        _require_values(flag, returned, size)
        return dict(_named(flag, returned))

    try:
        values = jax.eval_shape(checked, outputs, batch)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--training.metrics {flag}: {type(error).__name__}: {error}") from error
    for name, value in values.items():
        if _is_collected(value):
            _require_sums(name, value)
    return tuple(values)


def _require_values(flag: str, returned: Any, size: int) -> None:
    """Raises UsageError unless a metric returned one value for each of `size` examples, or a dict of such values.

    A `Mean` of arrays [size], and a metric of `clu` or `metrax`, are values too.
    """
    where = f"--training.metrics {flag}"
    if isinstance(returned, Mapping):
        wrong = "an empty dict" if not returned else next((f"the name {n!r}" for n in returned if n != str(n)), "")
    else:
        wrong = "" if isinstance(returned, Mean) or _is_collected(returned) or is_array(returned) else kind_of(returned)
    if wrong:
        raise UsageError(
            f"{where} returned {wrong}: wanted one value per example, [{size}], a dict of several by their names, an "
            "mpjax.Mean of totals and weights per example, or a metric of clu or metrax"
        )
    for name, value in _named(flag, returned).items():
        if not _is_collected(value):
            require_per_example(value, size, where if name == flag else f"{where}: {name}")


def _require_sums(name: str, metric: Any) -> None:
    """Raises UsageError unless a merge of two metrics adds their arrays, and `compute` of the sums returns a number."""
    shapes, treedef = jax.tree.flatten(metric)
    ones, twos = (treedef.unflatten([np.full(x.shape, n, x.dtype) for x in shapes]) for n in (1, 2))
    where = f"--training.metrics {name}: merge() of {type(ones).__name__} failed"
    with named_failure(where, ones), jax.numpy_dtype_promotion("standard"):  # the default of clu and metrax
        merged = jax.tree.leaves(ones.merge(twos))
    added = len(merged) == len(shapes) and all(
        x.shape == np.shape(m) and np.all(np.asarray(m) == 3) for x, m in zip(shapes, merged, strict=True)
    )
    if not added:
        raise UsageError(
            f"--training.metrics {name}: merging two {type(ones).__name__} does not add their arrays, so it cannot be "
            "summed over examples and devices; return values per example, [B]"
        )
    with contextlib.suppress(ZeroDivisionError):  # ones are not the sums of a set
        _number_of(name, ones)


def _values(flag: str, function: "Metric", outputs: Any, batch: Batch) -> Values:
    """Computes the values of a metric by name; a metric of `clu` or `metrax` is computed for each example alone."""
    returned = _named(flag, function(outputs, batch))

    def collected(name: str, metric: Any) -> _Collected:
        def of_one(outputs, example):
            alone = jax.tree.map(lambda x: x[None], (outputs, example))
            return jax.tree.leaves(_named(flag, function(*alone))[name])

        arrays = jax.vmap(of_one)(outputs, dict(batch))
        return _Collected(arrays, name, jax.tree.structure(metric), tuple(x.dtype for x in arrays))

    return {name: collected(name, x) if _is_collected(x) else x for name, x in returned.items()}


def _number_of(name: str, metric: Any) -> float:
    """Calls `compute` of a metric of `clu` or `metrax`, and converts its result to a float.

    Raises:
      UsageError: it fails, or returns something other than one number.
      ZeroDivisionError: it divides Python numbers by zero.
    """
    where = f"--training.metrics {name}: compute() of {type(metric).__name__}"
    with jax.numpy_dtype_promotion("standard"):
        try:
            result = metric.compute()
        except ZeroDivisionError:
            raise
        except Exception as error:
            raise UsageError(f"{where} failed: {failure(error, file_of(metric))}") from error
    if not is_array(result):
        raise UsageError(f"{where} returned {kind_of(result)}: wanted a number; return one metric for each by its name")
    value = np.asarray(result)
    if value.shape:
        raise UsageError(f"{where} returned an array {value.shape}: wanted a number")
    return float(value)
