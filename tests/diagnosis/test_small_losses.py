"""A loss near zero says nothing by its relative error: the gradients are what counts."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose
from mpjax.models import MLP


X, Y = jax.random.normal(jax.random.key(0), (64, 16)), jnp.arange(64) % 4
ADVANTAGES = jax.random.normal(jax.random.key(1), (64,))
ADVANTAGES = (ADVANTAGES - ADVANTAGES.mean()) / ADVANTAGES.std()


@pytest.fixture(scope="module")
def model():
    return MLP(16, 32, 2, 4, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def known(model):
    """What the model answers in float32."""
    return model(X)


def _chosen(logits):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), Y[:, None], 1)[:, 0]


def _full(model, x=X):
    return model(x).astype(jnp.float32)


def ppo(model, known):
    ratio = jnp.exp(_chosen(_full(model)) - _chosen(known))
    return -jnp.mean(jnp.minimum(ratio * ADVANTAGES, jnp.clip(ratio, 0.8, 1.2) * ADVANTAGES))


def critic(model, known):
    return jnp.mean(_full(model, X + 1e-2)[:, 0]) - jnp.mean(_full(model)[:, 0])


def critic_in_half(model, known):
    fake, real = ((model(x).astype(jnp.bfloat16) + 5)[:, 0] for x in (X + 1e-2, X))
    return (jnp.mean(fake) - jnp.mean(real)).astype(jnp.float32)


def fitted(model, known):
    return jnp.mean(jnp.square(_full(model) - known))


def fitted_l1(model, known):
    return jnp.mean(jnp.abs(_full(model) - known))


def huber(model, known):
    return optax.huber_loss(_full(model), known).mean()


def log_cosh(model, known):
    return optax.log_cosh(_full(model), known).mean()


def distilled(model, known):
    teacher, student = jax.nn.log_softmax(known), jax.nn.log_softmax(_full(model))
    return jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), -1))


def centered(model, known):
    values = _full(model)[:, 0]
    return jnp.mean(values - values.mean())


def temporal_difference(model, known):
    values = _full(model)[:, 0]
    return jnp.mean((values - jax.lax.stop_gradient(values)) * ADVANTAGES)


def identity_of_the_logistic(model, known):
    values = _full(model)[:, 0]
    return jnp.mean(jax.nn.softplus(values) - jax.nn.softplus(-values) - values)


def excess_entropy(model, known):
    wanted = jax.nn.sigmoid(known)
    excess = optax.sigmoid_binary_cross_entropy(_full(model), wanted) - optax.sigmoid_binary_cross_entropy(
        known, wanted
    )
    return jnp.mean(excess)


HEALTHY = [
    *(ppo, critic, critic_in_half, fitted, fitted_l1, huber, log_cosh, distilled, centered, temporal_difference),
    *(identity_of_the_logistic, excess_entropy),
]
FAST = (critic_in_half, fitted)


@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        pytest.param(f, policy, marks=[] if f in FAST else pytest.mark.slow)
        for f, policy in zip(HEALTHY, itertools.cycle(("mixed_float16", "mixed_bfloat16")), strict=False)
    ],
)
def test_a_small_loss_with_gradients_that_are_right_is_healthy(model, known, loss, policy):
    scale = 1024.0 if policy == "mixed_float16" else 1.0
    found = diagnose(model, loss, known, policy=policy, loss_scale=scale)
    assert found.verdict == "healthy", found.evidence


class Shifted(nnx.Module):
    """A layer whose every output is off in half precision, as 1000 is added and taken off again."""

    def __init__(self):
        self.linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return (self.linear(x) + 1.5 + 1000) - 1000


def test_what_cancels_in_a_layer_is_a_fault_though_the_gradients_are_right():
    found = diagnose(
        Shifted(), lambda model, x: jnp.mean(model(x).astype(jnp.float32)), X, policy="p=f32,c=bf16,o=bf16"
    )
    assert found.verdict == "rounding"
    assert abs(found.loss[0] / found.loss[1] - 1) > 0.05  # the tolerance
