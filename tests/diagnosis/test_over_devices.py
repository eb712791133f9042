"""A step under `jax.shard_map` on two devices is emulated like one on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mpjax.diagnosis import Emulator, Recorder, diagnose


ALL, DATA = PartitionSpec(), PartitionSpec("data")
X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
W = jnp.linspace(0.1, 0.9, 12).reshape(4, 3)


def divided(body, in_specs, *, tracked):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=ALL, check_vma=tracked)


def local(w, x):
    """A product, a loop and a mean over devices, of which only the product is in half precision."""
    y = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
    total, _ = jax.lax.scan(lambda sum, row: (sum + jnp.sum(row * row), None), jnp.sum(y) * 0.0, y)
    return jax.lax.pmean(total, "data")


@pytest.mark.parametrize(
    "tracked",
    [pytest.param(True, id="check_vma"), pytest.param(False, id="no check_vma", marks=pytest.mark.slow)],
)
def test_values_gradients_and_readings_are_those_of_all_devices(tracked):
    step = jax.value_and_grad(divided(local, (ALL, DATA), tracked=tracked))
    recorder = Recorder()
    loss, gradient = Emulator(recorder=recorder).run(jax.make_jaxpr(step)(W, X), [W, X])
    exact, slope = jax.value_and_grad(lambda w: jnp.sum(jnp.square(X @ w)) / 2)(W)
    np.testing.assert_allclose(loss.wide, exact, rtol=1e-6)
    np.testing.assert_allclose(gradient.wide, slope, rtol=1e-5)
    assert 0 < np.abs(gradient.low - np.asarray(slope)).max() < 0.01
    products = [
        (site.direction, reading.size)
        for site, reading in zip(recorder.sites, recorder.readings(), strict=True)
        if site.operation == "dot_general"
    ]
    assert products == [("forward", 12.0), ("backward", 24.0)]  # the gradient of a weight is there on each device


class Net(nnx.Module):
    def __init__(self):
        self.first, self.last = (nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(2))

    def __call__(self, x):
        return self.last(self.first(x) * 1e4 * 1e3)


@pytest.mark.slow
def test_an_overflow_on_devices_has_its_place_and_a_rule():
    def loss(model, batch):
        graph, state = nnx.split(model)
        mean = lambda state, x: jax.lax.pmean(jnp.mean(nnx.merge(graph, state)(x)), "data")  # noqa: E731
        return divided(mean, (ALL, DATA), tracked=True)(state, batch)

    found = diagnose(Net(), loss, X, policy="mixed_float16")
    assert (found.verdict, found.direction, found.verified) == ("overflow", "forward", True)
    assert "test_over_devices" in found.source
