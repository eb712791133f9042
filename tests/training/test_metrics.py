"""Metrics of a step in one buffer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training.train_step import Metrics, pack


PACKED = pack({"loss": jnp.float32(0.1), "skipped": jnp.int32(16_777_215), "finite": jnp.bool_(True)})


def test_values_come_back_by_name():
    assert list(PACKED) == ["loss", "skipped", "finite"]
    assert len(PACKED) == 3
    assert dict(jax.device_get(PACKED)) == {"loss": np.float32(0.1), "skipped": 16_777_215, "finite": 1}
    with pytest.raises(KeyError):
        PACKED["accuracy"]


def test_metrics_equal_a_dict_of_the_same_values():
    assert jax.device_get(PACKED) == {"loss": np.float32(0.1), "skipped": 16_777_215, "finite": 1}


def test_metrics_cannot_be_replaced():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PACKED.names = ("accuracy",)


def test_one_float32_buffer_passes_through_jit():
    (leaf,) = jax.tree.leaves(jax.jit(lambda m: m)(PACKED))
    assert (leaf.dtype, leaf.shape) == (jnp.float32, (3,))


def test_half_precision_metrics_are_widened():
    assert isinstance(PACKED, Metrics)
    assert pack({"loss": jnp.float16(0.5)})["loss"].dtype == jnp.float32
