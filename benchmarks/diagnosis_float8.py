"""Planted faults of products in float8: how many a diagnosis finds, locates and repairs, and what it says of health.

    python benchmarks/diagnosis_float8.py --output benchmarks/results/diagnosis_float8_cpu.json

Thirty faults: five kinds, each in one of six layers. A fault counts as found if the verdict is that of its kind, the
module is the one it was planted in, and the rules, verified by running the step, are for that module alone. Ten healthy
runs: seeds, recipes, and sizes of inputs and weights.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

import mpjax
from mpjax.precision.float8 import HISTORY


DEPTH, WIDTH, EXAMPLES = 6, 64, 8
Around = Callable[[Any, jax.Array], jax.Array]


class Net(nnx.Module):
    """Six linear layers of width 64 with residual connections."""

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([nnx.Dict(layer=nnx.Linear(WIDTH, WIDTH, rngs=rngs)) for _ in range(DEPTH)])

    def layer(self, number: int) -> nnx.Linear:
        return self.blocks[number]["layer"]


def batch(seed: int = 0, size: float = 1.0) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(seed)
    x, y = (jnp.asarray(random.normal(size=(EXAMPLES, WIDTH)), jnp.float32) for _ in range(2))
    return x * size, y


def loss_of(place: int = -1, around: Around = lambda layer, x: layer(x)) -> Callable:
    def loss(model: Net, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = batch
        for number in range(DEPTH):
            layer = model.layer(number)
            x = x + jnp.tanh(around(layer, x) if number == place else layer(x))
        return jnp.mean(jnp.square(x.astype(jnp.float32) - y))

    return loss


def outlier_weight(place: int):
    """One weight, of an input that is zero, sets the scale; the others underflow."""
    model = Net(place)
    kernel = model.layer(place).kernel
    kernel[...] = (kernel[...] * 1e-2).at[0, 0].set(3e4)
    return model, loss_of(place, lambda layer, x: 100 * layer(x.at[:, 0].set(0))), "mixed_float8", "underflow"


def outlier_activation(place: int):
    """One number of each example sets the scale of the activations, and meets weights of zero."""
    model = Net(place)
    kernel = model.layer(place).kernel
    kernel[...] = kernel[...].at[0].set(0)

    def around(layer: Any, x: jax.Array) -> jax.Array:
        return layer((x * 1e-2).at[:, 0].set(3e4)) * 100

    return model, loss_of(place, around), "mixed_float8", "underflow"


def outlier_row(place: int):
    """One example of a batch sets the scale, so that the gradients of all others are flushed."""
    sizes = jnp.full((EXAMPLES, 1), 1e-7).at[0].set(1e6)
    return Net(place), loss_of(place, lambda layer, x: layer(x * sizes) / sizes), "mixed_float8", "underflow"


def _with_history(place: int, row: int, largest: float):
    model = Net(place)
    mpjax.apply_policy(model, "mixed_float8_delayed")
    history = getattr(model.layer(place), HISTORY)
    history[...] = history[...].at[0].set(4.0).at[1].set(0.5).at[row].set(largest)
    return model, loss_of(), "mixed_float8_delayed", "overflow"


def stale_activations(place: int):
    """Activations have grown a thousand times since the history was made."""
    return _with_history(place, 0, 1e-3)


def stale_weights(place: int):
    """Weights have grown a thousand times since the history was made."""
    return _with_history(place, 1, 1e-4)


FAULTS = (outlier_weight, outlier_activation, outlier_row, stale_activations, stale_weights)

HEALTHY = (
    *((seed, "mixed_float8", 1.0) for seed in (10, 11, 12)),
    *((seed, "mixed_float8_rowwise", 1.0) for seed in (13, 14)),
    *((seed, "mixed_mxfp8", 1.0) for seed in (15, 16)),
    (17, "mixed_float8_delayed", 1.0),
    (18, "mixed_float8", 1e-3),
    (19, "mixed_float8", 10.0),
)


def told(model: Net, loss: Callable, policy: str, given: Any) -> dict:
    found = mpjax.diagnose(model, loss, given, policy=policy)
    return {"verdict": found.verdict, "path": found.path, "rules": found.rules, "verified": found.verified}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    faults, healthy = [], []
    for plant in FAULTS:
        for place in range(DEPTH):
            model, loss, policy, verdict = plant(place)
            path = f"blocks/{place}/layer"
            found = told(model, loss, policy, batch(place))
            right = found["verdict"] == verdict and found["path"] == path and found["verified"]
            faults.append(
                {"fault": plant.__name__, "in": path, **found, "right": right and set(found["rules"]) == {path}}
            )
            print(faults[-1], file=sys.stderr, flush=True)
    for seed, policy, size in HEALTHY:
        found = told(Net(seed), loss_of(), policy, batch(seed, size))
        healthy.append({"seed": seed, "policy": policy, "size": size, **found, "right": found["verdict"] == "healthy"})
        print(healthy[-1], file=sys.stderr, flush=True)
    counts = {
        name: f"{sum(each['right'] for each in rows)} of {len(rows)}"
        for name, rows in (("faults", faults), ("healthy", healthy))
    }
    if arguments.output:
        results = {**describe(), **counts, "runs": faults + healthy}
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
