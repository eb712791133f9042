"""An objective as one value."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.training import Mean, RunObjective, as_stored, means


def test_a_batch_is_prepared_with_the_key_in_training_and_without_in_evaluation():
    keys = []

    def prepare(batch, key):
        keys.append(key)
        return {"x": batch["x"] + 1}

    def function(model, batch, key):
        return {"loss": batch["x"] * (2 if key is None else 1)}

    objective = RunObjective(function, prepare)
    key, batch = jax.random.key(0), {"x": jnp.array([1.0, 3.0])}
    assert float(objective.loss(None, batch, key)[0].value) == 3.0
    assert objective.measure(None, batch)["loss"].tolist() == [4.0, 8.0]
    assert keys == [key, None]


def test_sums_are_divided_by_the_number_of_examples_or_by_their_weights():
    sums = {"loss": np.float64(6), "rate": Mean(np.float64(6), np.float64(2)), "count": np.float64(4)}
    assert means(sums) == {"loss": 1.5, "rate": 3.0}


def test_a_quotient_without_weight_is_nan():
    none = np.float64(0)
    assert np.isnan(list(means({"rate": Mean(none, none), "loss": none, "count": none}).values())).all()


def test_quotients_of_a_set_are_averaged_in_float64():
    of_classes = Mean(np.array([1.0, 0.0, 2.0]), np.array([3.0, 0.0, 3.0]))
    assert means({"iou": of_classes, "count": np.float64(1)}) == {"iou": 0.5}


def test_several_numbers_of_an_example_are_averaged():
    """Of a text, one for each token: in training over the batch, in evaluation for each example."""
    objective = RunObjective(lambda model, batch, key: {"loss": batch["x"]})
    batch = {"x": jnp.array([[1.0, 3.0], [5.0, 7.0]])}
    loss, _ = objective.loss(None, batch, jax.random.key(0))
    assert (float(loss.total), float(loss.weight)) == (16.0, 4.0)
    assert objective.measure(None, batch)["loss"].tolist() == [2.0, 6.0]


def test_a_batch_as_it_is_stored():
    batch = {"x": 1}
    assert as_stored(batch, None) is batch
