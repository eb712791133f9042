"""Small programs compiled ahead of time, also for arrays that a run has on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.diagnosis import brought_here, compiled, program_of


@pytest.fixture(params=[PartitionSpec(), PartitionSpec("data")], ids=["replicated", "sharded"])
def on_two_devices(request):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, request.param))


def test_an_array_of_two_devices_is_brought_to_the_first(on_two_devices):
    assert len(on_two_devices.devices()) == 2
    here = brought_here(on_two_devices)
    assert here.devices() == {jax.local_devices()[0]}
    np.testing.assert_array_equal(here, np.arange(8.0).reshape(4, 2))
    assert brought_here(here) is here


def test_the_step_of_a_run_on_two_devices_is_looked_at_on_one(on_two_devices):
    def loss_of(params, batch):
        return jnp.sum(params["w"] * batch)

    program = program_of(loss_of, {"w": on_two_devices}, {"batch": on_two_devices})
    assert [array.devices() for array in program.inputs] == [{jax.local_devices()[0]}] * 2


def test_a_diagnosis_runs_on_the_default_device():
    def loss_of(params, batch):
        return jnp.sum((params * batch).astype(jnp.float32))

    first, second = jax.devices()[:2]
    for device in (first, second, first):
        with jax.default_device(device):
            program = program_of(loss_of, jnp.ones((4, 2)), {"batch": jnp.ones((4, 2))})
            assert [array.devices() for array in program.inputs] == [{device}] * 2
            assert compiled(jnp.negative)(*program.inputs[:1]).devices() == {device}


def test_a_program_is_compiled_once_for_a_shape_and_not_in_another_program():
    traced = []

    @compiled
    def doubled(x, *, times):
        traced.append(x.shape)
        return times * x

    for shape in ((2,), (3,), (2,)):
        np.testing.assert_array_equal(doubled(jnp.ones(shape), times=2.0), np.full(shape, 2.0))
    assert traced == [(2,), (3,)]
    jax.jit(lambda x: doubled(x, times=2.0))(jnp.ones(2))
    assert len(traced) == 3
