"""Sums that only the derivative has: the loss is right, the gradient is not, and the sum is named with its terms."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose, emulated, sums


X = jax.random.normal(jax.random.key(0), (16, 4))


class Own(nnx.Module):
    """A weight and a function of it and of the input, in the dtype that the policy sets."""

    def __init__(self, function):
        self.function, self.dtype = function, jnp.float32
        self.w = nnx.Param(jax.random.normal(jax.random.key(1), (4, 4)))

    def __call__(self, x):
        return self.function(self.w[...].astype(self.dtype), x.astype(self.dtype))


class Net(nnx.Module):
    def __init__(self, function):
        self.own = Own(function)

    def __call__(self, x):
        return self.own(x)


def mean_square(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def _one_after_another(cotangents):
    return jax.lax.scan(lambda total, each: (total + each, None), jnp.zeros_like(cotangents[0]), cotangents)[0]


@jax.custom_vjp
def copies(x):
    return jnp.broadcast_to(x, (3000, *x.shape))


copies.defvjp(lambda x: (copies(x), None), lambda _, cotangents: (_one_after_another(cotangents),))


def read_in_every_step(w, x):
    return jax.lax.scan(lambda _, k: (0, x[0] @ w * (1 + k)), 0, jnp.linspace(0, 1, 3000, dtype=w.dtype))[1]


def used_often(w, x):
    hidden = jnp.tanh(x @ w)
    return jnp.stack([hidden * (1 + step * 1e-3) for step in range(300)])


N = 4000
EVERY_OTHER = jnp.arange(N) % 2

SUMS = {
    "one row": (lambda w, x: (x @ w)[jnp.zeros(N, int)], "scatter-add", N),
    "rows of the weight": (lambda w, x: w[EVERY_OTHER], "scatter-add", N),
    "take": (lambda w, x: jnp.take(x @ w, EVERY_OTHER, axis=0), "scatter-add", N),
    "a graph's edges": (lambda w, x: (lambda h: h[EVERY_OTHER] - h[2 + EVERY_OTHER] / 8)(x @ w), "scatter-add", N),
    "neighbours": (lambda w, x: jnp.tanh(x @ w)[jnp.zeros((16, 250), int)], "scatter-add", N),
    "copies": (lambda w, x: copies(x @ w), "add", 3001),
    "a scan's constant": (read_in_every_step, "add_any", 3001),
    "used often": (used_often, "add_any", 300 if jax.__version_info__ >= (0, 12) else 301),  # before: and zeros
}
SLOW = ("a scan's constant", "used often", "take", "a graph's edges", "copies", "one row")
CASES = [
    pytest.param(name, policy, id=f"{name}-{policy}", marks=[pytest.mark.slow] if name in SLOW else [])
    # "used often" is within 1 % in float16.
    for name, policy in zip(SUMS, itertools.cycle(("mixed_float16", "mixed_bfloat16")), strict=False)
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_a_sum_of_cotangents_that_is_wrong_is_named_though_the_loss_is_right(name, policy):
    function, operation, terms = SUMS[name]
    found = diagnose(Net(function), mean_square, X, policy=policy, loss_scale=2.0**12 if "float16" in policy else 1.0)
    assert abs(found.loss[0] / found.loss[1] - 1) < 0.05
    assert (found.verdict, found.path, found.direction, found.operation) == ("rounding", "own", "backward", operation)
    dtype = policy.removeprefix("mixed_")
    assert f"the sum of {terms:,} cotangents of " in found.evidence
    assert f" in {dtype}, {operation} in own (backward, " in found.evidence
    assert (found.rules, found.verified) == ({"own": "float32"}, True)


def test_the_parameter_whose_cotangents_are_added_is_named():
    found = diagnose(Net(SUMS["rows of the weight"][0]), mean_square, X, policy="mixed_bfloat16")
    assert "the sum of 4,000 cotangents of `own/w` in bfloat16" in found.evidence
    other = diagnose(Net(SUMS["one row"][0]), mean_square, X, policy="mixed_bfloat16")
    assert "cotangents of a value of shape [16, 4] in bfloat16" in other.evidence


def test_a_sum_that_rounds_less_with_float32_s_inputs_is_named_all_the_same(monkeypatch):
    def exact_alone(*args, **options):
        trace = emulated(*args, **options)
        return trace._replace(readings=[reading._replace(noise=0.0) for reading in trace.readings])

    monkeypatch.setattr(sums, "emulated", exact_alone)
    function, operation, _ = SUMS["rows of the weight"]
    found = diagnose(Net(function), mean_square, X, policy="mixed_bfloat16", search=False)
    assert (found.verdict, found.path, found.operation) == ("rounding", "own", operation)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: (x @ w)[jnp.arange(16)],  # as often as it is there
        lambda w, x: (x @ w)[jnp.arange(64) % 16],
        pytest.param(lambda w, x: sum((x @ w) * (step / 64) for step in range(1, 24)), marks=pytest.mark.slow),
        lambda w, x: jnp.broadcast_to((x @ w)[:, None], (16, 8, 4)),
    ],
    ids=["once", "four times", "23 uses", "broadcast"],
)
def test_short_sums_are_healthy(function, policy):
    scale = 2.0**8 if policy == "mixed_float16" else 1.0
    found = diagnose(Net(function), mean_square, X, policy=policy, loss_scale=scale)
    assert found.verdict == "healthy", found.evidence


def test_a_healthy_step_names_the_sum_that_loses_most_from_one_percent_on():
    found = diagnose(Net(lambda w, x: (x @ w)[jnp.zeros(100, int)]), mean_square, X, policy="mixed_bfloat16")
    assert found.verdict == "healthy"
    assert "the sum of 100 cotangents of a value of shape [16, 4] in bfloat16, scatter-add in own" in found.evidence


class Twice(nnx.Module):
    """A layer whose derivative is the small difference of large numbers, and whose result is right."""

    def __init__(self):
        self.own = Own(lambda w, x: shifted(x @ w))

    def __call__(self, x):
        return self.own(x)


@jax.custom_vjp
def shifted(x):
    return x


shifted.defvjp(lambda x: (x, None), lambda _, cotangent: ((cotangent + 4000) - 4000,))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_derivative_that_cancels_is_rounding_in_the_backward_pass_of_its_module(policy):
    def loss_fn(model, x):
        return 16 * jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    found = diagnose(Twice(), loss_fn, X, policy=policy)
    assert abs(found.loss[0] / found.loss[1] - 1) < 0.05
    assert (found.verdict, found.path, found.direction) == ("rounding", "own", "backward")
    assert (found.rules, found.verified) == ({"own": "float32"}, True)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_at_the_end_of_training_the_terms_of_a_gradient_cancel_and_that_is_healthy(policy):
    """Of a least-squares fit the residuals are not zero; the gradient is, but for its rounding."""
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    wanted = jax.random.normal(jax.random.key(2), (16, 4))
    ones = jnp.concatenate([X, jnp.ones((16, 1))], axis=1)
    fit = jnp.linalg.lstsq(ones, wanted)[0]
    linear.kernel[...], linear.bias[...] = fit[:4] * (1 + 1e-3), fit[4]

    def loss_fn(model, x):
        return jnp.mean(jnp.square(model(x).astype(jnp.float32) - wanted))

    scale = 2.0**8 if policy == "mixed_float16" else 1.0
    found = diagnose(linear, loss_fn, X, policy=policy, loss_scale=scale)
    assert found.verdict == "healthy", found.evidence
