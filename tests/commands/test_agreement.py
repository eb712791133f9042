"""Processes that are about to train different things."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.commands import require_agreement
from mpjax.errors import UsageError
from mpjax.training import TrainState, make_mesh


ROWS = [{"image": np.full((2, 2), number), "label": number} for number in range(5)]


def said_by(rows=ROWS, scale=1.0, weight=2.0):
    """What a process with these examples, this program and this initial weight says."""
    said = []
    company = types.SimpleNamespace(processes=2, gather=lambda mine: said.append(mine) or [mine, mine])
    whole = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec())
    state = jax.device_put(TrainState(jnp.int32(0), {"w": jnp.float32(weight)}, {}, {}, {}), whole)
    parts = types.SimpleNamespace(source=types.SimpleNamespace(train=rows, test=rows[:2]))
    lowered = {1: jax.jit(lambda x: x * jnp.float32(scale)).lower(jnp.float32(1))}
    require_agreement(company, parts, lowered, state)
    return company, parts, lowered, state, said[0]


def test_equal_processes_agree():
    assert said_by()[-1] == said_by()[-1]
    assert len(set(said_by()[-1].values())) == 4


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"rows": ROWS[:4]}, "the training data"),
        ({"rows": [*ROWS[:2], {"image": np.zeros((2, 2)), "label": 2}, *ROWS[3:]]}, "the training data"),
        ({"scale": 3.0}, "the program of the training step"),
        ({"weight": 2.5}, "the initial state"),
    ],
    ids=["fewer examples", "another example", "program", "state"],
)
def test_what_differs_is_named(other, what):
    company, *rest, mine = said_by()
    theirs = said_by(**other)[-1]
    company.gather = lambda _: [mine, theirs, mine]
    with pytest.raises(UsageError, match=f"^{what} of processes 0, 2 and of 1 differ"):
        require_agreement(company, *rest)


def test_one_process_compares_nothing():
    require_agreement(types.SimpleNamespace(processes=1), None, {}, None)
