"""An objective as one value."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.training.objective import Objective, as_stored, mean_of, means


def test_a_batch_is_prepared_with_the_key_in_training_and_without_in_evaluation():
    keys = []

    def prepare(batch, key):
        keys.append(key)
        return {"x": batch["x"] + 1}

    def loss_of(model, batch, key):
        return mean_of(batch["x"]), {}

    objective = Objective(prepare, loss_of, lambda model, batch: batch["x"] * 2, lambda out, batch: {"loss": out})
    key, batch = jax.random.key(0), {"x": jnp.array([1.0, 3.0])}
    assert float(objective.loss(None, batch, key)[0].value) == 3.0
    assert objective.measure(None, batch)["loss"].tolist() == [4.0, 8.0]
    assert keys == [key, None]


def test_sums_are_divided_by_the_number_of_examples():
    assert means({"loss": np.float64(6), "count": np.float64(4)}) == {"loss": 1.5}


def test_a_batch_as_it_is_stored():
    batch = {"x": 1}
    assert as_stored(batch, None) is batch
