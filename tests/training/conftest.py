"""A small network and a step to train it."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.precision import apply_policy, dynamic_loss_scaling
from mpjax.training import TrainState, create_state, cross_entropy, make_eval_step, make_train_step, take_apart


class Net(nnx.Module):
    """Two linear layers, with batch norm or without, with dropout or without."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = self.norm(x) if self.norm else x
        x = nnx.relu(x)
        return self.head(self.dropout(x) if self.dropout else x)


@functools.cache
def initialised(**options):
    return nnx.split(Net(rngs=nnx.Rngs(0), **options))


def new_net(**options) -> Net:
    """A `Net` with arrays of its own, as a step donates them."""
    graph, state = initialised(**options)

    def copy(leaf):
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jax.device_put(np.array(leaf))

    return nnx.merge(graph, jax.tree.map(copy, state))


def weighted_loss(model, batch, key):
    """Cross entropy times each example's `poison`, which is 1 in a good batch."""
    logits = model(batch["image"])
    return jnp.mean(cross_entropy(logits, batch["label"]) * batch["poison"]), {"largest": jnp.max(logits)}


@dataclasses.dataclass
class Trainer:
    step: Callable
    state: TrainState
    structure: object
    tx: optax.GradientTransformation
    loss: Callable

    def run(self, batches):
        """The state on the host before the first and after every step, and the metrics of every step."""
        states, metrics = [jax.device_get(self.state)], []
        for batch in batches:
            self.state, of_step = self.step(self.state, batch)
            states.append(jax.device_get(self.state))
            metrics.append(dict(jax.device_get(of_step)))
        return states, metrics

    def evaluate(self, batch):
        """Logits in evaluation mode."""
        measure = make_eval_step(self.structure, lambda model, batch: {"logits": model(batch["image"])[:, 0]})
        return float(measure(self.state.params, self.state.stats, batch)["logits"])


@pytest.fixture(scope="session")
def trainer():
    """Makes a trainer of a new `Net`."""

    def make(inner=None, *, policy="float32", scaling=dynamic_loss_scaling, loss=weighted_loss, net=None, **settings):
        model = new_net(**(net or {}))
        apply_policy(model, policy)
        structure, params, stats = take_apart(model)
        rate = settings.get("learning_rate", 0.1)
        tx = scaling(inner or optax.adamw(rate))
        state = create_state(params, stats, tx, ema=settings.get("ema", 0) > 0)
        return Trainer(make_train_step(structure, tx, loss, **settings), state, structure, tx, loss)

    return make


@pytest.fixture(scope="session")
def batch():
    """Makes a batch: `batch(seed)`, `batch(seed, poisoned=(5,))` for gradients that are not finite."""

    def make(seed, *, size=8, poisoned=()):
        rng = np.random.default_rng(seed)
        poison = np.ones(size, np.float32)
        poison[list(poisoned)] = np.inf
        return {
            "image": jnp.asarray(rng.normal(size=(size, 4)), jnp.float32),
            "label": jnp.asarray(rng.integers(3, size=size), jnp.int32),
            "poison": jnp.asarray(poison),
        }

    return make
