"""Evaluation: exact means, exact counts, the model's own policy, and nothing touched."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.precision import apply_policy
from mpjax.training import evaluate, make_eval_step, take_apart


class Affine(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def measure(model, batch):
    return {"value": batch["value"], "out": model(batch["value"][:, None])[:, 0]}


@pytest.fixture(scope="module")
def parts():
    structure, params, stats = take_apart(Affine())
    return make_eval_step(structure, measure), params, stats


def in_batches(values, size, fill=0.0):
    for start in range(0, len(values), size):
        part = values[start : start + size]
        padding = np.full(size - len(part), fill, np.float32)
        weight = np.concatenate([np.ones_like(part), np.zeros_like(padding)])
        yield {"value": np.concatenate([part, padding]), "weight": weight, "label": np.zeros(size, np.int32)}


@pytest.mark.parametrize("size", [64, 300, 4096])
def test_the_mean_over_50000_examples_is_exact(parts, size):
    """To 1e-6, also where the last batch is short."""
    values = (1000 + np.random.default_rng(0).normal(size=50_000)).astype(np.float32)
    found = evaluate(*parts, in_batches(values, size))["value"]
    assert found == pytest.approx(float(np.mean(values.astype(np.float64))), rel=1e-6)


def test_a_short_batch_counts_its_true_size(parts):
    """1, 2, 3 and 10 in batches of three have mean 4, not the mean of 2 and 10 or of 2 and 10 / 3."""
    assert evaluate(*parts, in_batches(np.array([1, 2, 3, 10], np.float32), 3))["value"] == 4.0


@pytest.mark.parametrize("fill", [np.nan, np.inf, 1e30])
def test_padding_cannot_leak(parts, fill):
    found = evaluate(*parts, in_batches(np.array([1, 2, 3, 10], np.float32), 3, fill=fill))
    assert found["value"] == 4.0
    assert found["out"] == pytest.approx(4.0, rel=1e-4)


def test_nan_of_a_real_example_is_not_hidden(parts):
    assert np.isnan(evaluate(*parts, in_batches(np.array([1, np.nan, 3], np.float32), 3))["value"])


def test_without_weights_every_example_counts(parts):
    batches = ({"value": np.full(2, v, np.float32), "label": np.zeros(2, np.int32)} for v in (1, 2))
    assert evaluate(*parts, batches)["value"] == 1.5


@pytest.mark.slow
def test_evaluation_uses_the_running_statistics_and_touches_nothing(trainer, batch):
    made = trainer(policy="mixed_float16")
    made.run([batch(1)])
    before = jax.device_get(made.state)
    one, two = (made.evaluate(jax.tree.map(lambda x, n=n: x[:n], batch(2))) for n in (1, 1))
    assert one == two
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(made.state)), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("policy", "dtype"), [("float32", "float32"), ("mixed_bfloat16", "bfloat16")])
def test_evaluation_runs_under_the_policy_of_the_model(policy, dtype):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    apply_policy(model, policy)
    structure, params, stats = take_apart(model)
    step = make_eval_step(structure, lambda model, batch: {"out": model(batch["image"])[:, 0]})
    data = {"image": jnp.ones((1, 2)), "label": jnp.zeros(1, jnp.int32)}
    products = [line for line in step.lower(params, stats, data).as_text().splitlines() if "dot_general" in line]
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert len(products) == 1
    assert f"tensor<2x2x{short}>" in products[0]
    assert step(params, stats, data)["out"].dtype == jnp.float32


def test_batches_are_dispatched_before_anything_is_read(parts):
    """Nothing waits for a batch before the next is on its way."""
    step, params, stats = parts
    events = []

    class Recorded:
        def __init__(self, value):
            self.value = value

        def __array__(self, dtype=None, copy=None):
            events.append("read")
            return np.asarray(self.value)

    def recording(params, stats, batch):
        events.append("step")
        return {name: Recorded(value) for name, value in step(params, stats, batch).items()}

    data = next(in_batches(np.ones(3, np.float32), 3))
    evaluate(recording, params, stats, itertools.repeat(data, 4))
    assert events[:4] == ["step"] * 4


def test_only_a_few_batches_wait_on_the_device():
    """While batch n is made, batch n - 4 has been measured, however many there are."""
    done, most = [], []

    class Sum:
        def __init__(self, number):
            self.number = number

        def block_until_ready(self):
            done.append(self.number)
            return self

        def __array__(self, dtype=None, copy=None):
            return np.asarray(1.0)

    def batches():
        for number in range(20):
            most.append(number - max(done, default=-1))
            yield number

    found = evaluate(lambda params, stats, batch: {"loss": Sum(batch), "count": Sum(batch)}, {}, {}, batches())
    assert (max(most), found) == (4, {"loss": 1.0})
