"""Devices that are not there: their description, and what is said where nothing compiles for them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.errors import UsageError
from mpjax.plan import GPUS, compiled_for, mesh_of, target, target_text


def test_a_description_has_the_facts_of_the_gpu():
    text = target_text(GPUS["h200"])
    fields = dict(re.findall(r"^  (\w+): (\S+)$", text, re.MULTILINE))
    numbers = {name: float(value) for name, value in fields.items() if re.fullmatch(r"[\d.]+", value)}
    assert numbers["core_count"] == 132
    assert numbers["memory_bandwidth"] == 4.8e12
    assert numbers["shared_memory_per_block_optin"] == 232448
    assert numbers["device_memory_size"] == 150_110_011_392
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "dnn_version_info { major: 9 minor: 10 patch: 0 }" in text
    assert text.count("{") == text.count("}")


def test_instructions_of_one_generation_only_are_for_hopper_and_later():
    assert [name for name in GPUS if "ACCELERATED_FEATURES" in target_text(GPUS[name])] == ["h100", "h200", "b200"]


def test_a_gpu_that_xla_does_not_take_is_a_clear_error(plugin, monkeypatch):
    def refuse(topology, description):
        raise ValueError("unknown device")

    monkeypatch.setattr(target, "absent_devices", refuse)
    target._devices.cache_clear()
    with pytest.raises(UsageError, match="--gpu b200: XLA in jaxlib .* does not support it: unknown device; choose"):
        mesh_of("b200", 3)


@pytest.mark.parametrize("name", GPUS)
def test_xla_compiles_for_every_gpu_in_the_table(plugin, name):
    """A product and a softmax, the very least; no toolkit and no driver are asked for."""
    mesh = mesh_of(name, 1)
    device = mesh.devices.flat[0]
    assert device.platform == "gpu"
    assert device.compute_capability == ".".join(map(str, GPUS[name].capability))
    array = jax.ShapeDtypeStruct((64, 64), jnp.float16, sharding=NamedSharding(mesh, PartitionSpec()))
    step = jax.jit(lambda x, w: jax.nn.softmax((x @ w).astype(jnp.float32)))
    assert "ENTRY" in compiled_for(step.lower(array, array), name).as_text()


def test_planning_leaves_the_devices_of_this_process_as_they_are(plugin):
    before = jax.devices()
    mesh_of("h100", 2)
    assert jax.devices() == before
    assert jax.default_backend() == "cpu"
    assert float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2
