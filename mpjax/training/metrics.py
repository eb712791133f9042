"""A user's metrics of the test set, added to those of an objective."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.config.user_calls import file_of, named_failure
from mpjax.errors import UsageError, failure
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.training.objective import Batch, Mean, Metrics, Objective, Sums
from mpjax.training.user_objective import WEIGHT, is_array, kind_of, per_example, quantities, quotients, require_names


class _Collected(NamedTuple):
    """A metric of `clu` or `metrax`, whose arrays are sums over examples.

    Attributes:
      treedef: the structure of the metric.
      shapes: the shapes and dtypes of its arrays.
    """

    treedef: Any
    shapes: list[jax.ShapeDtypeStruct]


def with_metrics(
    objective: Objective,
    metrics: Mapping[str, Callable[[Any, Batch], Any]],
    outputs: Any,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    of_outputs: Callable[[Any], Any] = lambda outputs: outputs,
) -> Objective:
    """Adds a user's metrics to an objective, in evaluation only.

    Args:
      objective: the objective of the run.
      metrics: functions (`mpjax.extend.Metric`) by name; a function with one value has its name.
      outputs: the shapes of the result of `objective.outputs_of` for `batch`.
      batch: the shapes of a prepared batch.
      of_outputs: selects from the outputs the argument of the metrics.

    Raises:
      UsageError: a metric fails or returns something else on these shapes, or two have the same name. The message names
        it.
    """
    size = next(iter(batch.values())).shape[0]
    own: dict[str, _Collected | None] = {}
    taken = objective.names(jax.eval_shape(objective.values_of, outputs, batch))
    for flag, function in metrics.items():
        for name, collected in _kinds(flag, function, of_outputs(outputs), batch, size):
            if name in own or name in taken:
                raise UsageError(f"--training.metrics {flag}: there is a metric {name} already; give it another name")
            own[name] = collected
    require_names(own, "--training.metrics")

    def values_of(outputs, batch: Batch) -> Metrics:
        values = dict(objective.values_of(outputs, batch))
        for name, function in metrics.items():
            values |= dict(_values(name, function, of_outputs(outputs), batch))
        return values

    def conclude(sums: Sums) -> dict[str, float]:
        is_own = {name: name.removesuffix(WEIGHT).partition(_LEAF)[0] in own for name in sums}
        found = objective.conclude({name: value for name, value in sums.items() if not is_own[name]})
        simple = {name: value for name, value in sums.items() if is_own[name] and _LEAF not in name}
        found |= quotients({**simple, "count": sums["count"]})
        return found | {name: _computed(name, kind, sums) for name, kind in own.items() if kind is not None}

    return objective._replace(values_of=values_of, conclude=conclude)


_LEAF = "/sum"
"""The separator of the name of a collected metric and the number of one of its arrays."""


def _is_collected(value: Any) -> bool:
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def _named(flag: str, found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {flag: found}


def _kinds(
    flag: str, function: Callable, outputs: Any, batch: Any, size: int
) -> Iterator[tuple[str, _Collected | None]]:
    """Yields the name of each value of a metric; with its structure if it is a collected metric, else None."""

    def checked(outputs, batch):
        returned = function(outputs, batch)
        _require_values(flag, returned, size)
        return dict(_named(flag, returned))

    try:
        found = jax.eval_shape(checked, outputs, batch)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--training.metrics {flag}: {type(error).__name__}: {error}") from error
    for name, value in found.items():
        if not _is_collected(value):
            yield name, None
            continue
        leaves, treedef = jax.tree.flatten(value)
        collected = _Collected(treedef, leaves)
        _require_sums(name, collected)
        yield name, collected


def _require_values(flag: str, returned: Any, size: int) -> None:
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
            per_example(value, size, where if name == flag else f"{where}: {name}")


def _require_sums(name: str, kind: _Collected) -> None:
    """Raises UsageError unless a merge of two metrics adds their arrays, and `compute` of the sums returns a number."""
    one, two = (kind.treedef.unflatten([np.full(x.shape, n, x.dtype) for x in kind.shapes]) for n in (1, 2))
    where = f"--training.metrics {name}: merge() of {type(one).__name__} failed"
    with named_failure(where, one), jax.numpy_dtype_promotion("standard"):  # the default of clu and metrax
        merged = jax.tree.leaves(one.merge(two))
    added = len(merged) == len(kind.shapes) and all(
        x.shape == np.shape(m) and np.all(np.asarray(m) == 3) for x, m in zip(kind.shapes, merged, strict=True)
    )
    if not added:
        raise UsageError(
            f"--training.metrics {name}: merging two {type(one).__name__} does not add their arrays, so it cannot be "
            "summed over examples and devices; return values per example, [B]"
        )
    with contextlib.suppress(ZeroDivisionError):  # ones are not the sums of a set
        _number_of(name, one)


def _values(flag: str, function: Callable, outputs: Any, batch: Batch) -> Iterator[tuple[str, jax.Array]]:
    """Yields the quantities of a metric to sum over a set, [B, ...] each."""
    size = next(iter(batch.values())).shape[0]
    for name, value in _named(flag, function(outputs, batch)).items():
        if not _is_collected(value):
            yield from quantities({name: value}, size, "--training.metrics")
            continue

        def of_one(outputs, example, name=name):
            alone = jax.tree.map(lambda x: x[None], (outputs, example))
            return jax.tree.leaves(_named(flag, function(*alone))[name])

        for number, leaf in enumerate(jax.vmap(of_one)(outputs, dict(batch))):
            yield f"{name}{_LEAF}{number}", leaf.astype(widest(FLOAT32, leaf.dtype) if is_floating(leaf) else FLOAT32)


def _computed(name: str, kind: _Collected, sums: Sums) -> float:
    leaves = [jnp.asarray(sums[f"{name}{_LEAF}{n}"], x.dtype) for n, x in enumerate(kind.shapes)]
    try:
        return _number_of(name, kind.treedef.unflatten(leaves))
    except ZeroDivisionError:  # Python numbers, if there is no counted example; JAX's division gives NaN
        return float("nan")


def _number_of(name: str, metric: Any) -> float:
    """Calls `compute` of a metric.

    Raises:
      UsageError: it fails, or returns something other than one number.
      ZeroDivisionError: it divides Python numbers by zero.
    """
    where = f"--training.metrics {name}: compute() of {type(metric).__name__}"
    with jax.numpy_dtype_promotion("standard"):
        try:
            found = metric.compute()
        except ZeroDivisionError:
            raise
        except Exception as error:
            raise UsageError(f"{where} failed: {failure(error, file_of(metric))}") from error
    if not is_array(found):
        raise UsageError(f"{where} returned {kind_of(found)}: wanted a number; return one metric for each by its name")
    value = np.asarray(found)
    if value.shape:
        raise UsageError(f"{where} returned an array {value.shape}: wanted a number")
    return float(value)
