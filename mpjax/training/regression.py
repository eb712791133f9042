"""The objective of regression: losses in float32, and metrics of a whole set in the units of the data.

In shapes, B is the batch and K the number of targets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.policy import Policy
from mpjax.training.objective import OUTPUTS, Batch, Values, inputs_in
from mpjax.training.softmax_cross_entropy import as_float32


if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from mpjax.extend import Objective


def squared_error(outputs: Float[Array, "B K"], target: Float[Array, "B K"]) -> Float[Array, " B"]:
    """Computes the squared error of each example, the mean over its targets, float32 (or wider) [B]."""
    return jnp.mean(jnp.square(_errors(outputs, target)), axis=-1)


def absolute_error(outputs: Float[Array, "B K"], target: Float[Array, "B K"]) -> Float[Array, " B"]:
    """Computes the absolute error of each example, the mean over its targets, float32 (or wider) [B]."""
    return jnp.mean(jnp.abs(_errors(outputs, target)), axis=-1)


def huber(outputs: Float[Array, "B K"], target: Float[Array, "B K"], *, delta: float) -> Float[Array, " B"]:
    """Computes Huber's loss of each example, the mean over its targets, float32 (or wider) [B].

    Huber, 1964, Robust Estimation of a Location Parameter: error^2 / 2 up to `delta`, and delta (|error| - delta / 2)
    beyond it.
    """
    errors = jnp.abs(_errors(outputs, target))
    inside = jnp.minimum(errors, delta)  # the branch that is not taken would square a large error
    return jnp.mean(inside * (errors - inside / 2), axis=-1)


def _errors(outputs: jax.Array, target: jax.Array) -> jax.Array:
    """The errors in float32 or wider. The target has that dtype in the batch, and is never cast to a narrower one."""
    outputs = as_float32(outputs)
    return outputs - target.astype(outputs.dtype)


def loss_named(name: str, delta: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The loss `mse`, `mae` or `huber` of `training.loss`."""
    if name == "huber":
        return functools.partial(huber, delta=delta)
    return {"mse": squared_error, "mae": absolute_error}[name]


def regression_objective(
    policy: Policy, std: tuple[float, ...], loss: Callable[[jax.Array, jax.Array], jax.Array]
) -> Objective:
    """Creates the objective of regression, with the outputs of the model as its `outputs`.

    Batches hold `image` or `row`, which is cast to the compute dtype, and `target`, float32 [B, K], standardised; the
    model returns [B, K]. `loss` [B] is of standardised numbers. In evaluation there are also `mse`, `mae`, `rmse` and
    `r2` of the whole set, in the units of the data; of several targets, the mean.

    Args:
      policy: the policy whose compute dtype the inputs are cast to; targets are not cast.
      std: the standard deviation of each target, in the units of the data.
      loss: `(outputs, target) -> losses` [B].
    """

    def values_of(model, batch: Batch, key: jax.Array | None) -> Values:
        outputs = model(*inputs_in(batch, "regression", policy))
        values: dict = {"loss": loss(outputs, batch["target"]), OUTPUTS: outputs}
        if key is not None:
            return values
        errors, target = _errors(outputs, batch["target"]), as_float32(batch["target"])
        sums = {
            "squared": jnp.square(errors),
            "absolute": jnp.abs(errors),
            "target": target,
            "target_squared": jnp.square(target),
            "count": jnp.ones_like(target),
        }
        return values | {name: OfTargets(sums, name, std) for name in _METRICS}

    return values_of


def regression_in_order(metrics: dict[str, float]) -> dict[str, float]:
    """Copies the metrics of a set in order: `loss`, `rmse`, `mae`, `mse`, `r2`, then others."""
    return {name: metrics[name] for name in ("loss", "rmse", "mae", "mse", "r2")} | metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class OfTargets:
    """A metric of a set, as sums over its examples: of each example [B, K], or of all [K].

    Attributes:
      sums: the sums by name, float32 or wider; standardised.
      metric: `mse`, `mae`, `rmse` or `r2`.
      std: the standard deviation of each target, in the units of the data.
    """

    sums: dict[str, jax.Array]
    metric: str = dataclasses.field(metadata={"static": True})
    std: tuple[float, ...] = dataclasses.field(metadata={"static": True})

    def of_set(self) -> float:
        """Computes the metric of each target in float64 on the host, and returns their mean."""
        sums = {name: np.asarray(value, np.float64) for name, value in self.sums.items()}
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.mean(_METRICS[self.metric](sums, np.asarray(self.std, np.float64))))


_LEAST = 1e-4
"""The smallest variance of a target, as a share of its mean square, of which float32 sums still have four digits."""


def _r2(sums: dict[str, np.ndarray], std: np.ndarray) -> np.ndarray:
    """1 - residual / total sum of squares; NaN if the targets of the set are alike, or nearly so far from the mean."""
    del std  # a share
    total = sums["target_squared"] - np.square(sums["target"]) / sums["count"]
    return np.where(total > _LEAST * sums["target_squared"], 1 - sums["squared"] / total, np.nan)


_METRICS: dict[str, Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]] = {
    "mse": lambda sums, std: sums["squared"] / sums["count"] * np.square(std),
    "mae": lambda sums, std: sums["absolute"] / sums["count"] * std,
    "rmse": lambda sums, std: np.sqrt(sums["squared"] / sums["count"]) * std,
    "r2": _r2,
}
