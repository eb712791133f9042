"""Choosing tokens: which are possible, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.errors import UsageError
from mpjax.models.generation import Sampling, sampled


LOGITS = jnp.log(jnp.asarray([0.1, 0.4, 0.2, 0.3], jnp.float32))


def shares(**settings):
    keys = jax.random.split(jax.random.key(0), 4000)
    tokens = sampled(Sampling(**settings), jnp.broadcast_to(LOGITS, (4000, 4)), keys)
    return np.bincount(tokens, minlength=4) / 4000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 0, 0]),
        ({"temperature": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_tokens_are_as_frequent_as_the_settings_say(settings, expected):
    np.testing.assert_allclose(shares(**settings), expected, atol=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0: wanted 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan: wanted 0 or more"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1: wanted 0 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0: wanted more than 0 and at most 1"),
        ({"top_k": 3}, "temperature is 0, which takes the most probable token"),
    ],
)
def test_a_setting_out_of_range_or_without_a_meaning_is_an_error(settings, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**settings)
