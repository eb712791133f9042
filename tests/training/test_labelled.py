"""How logits are compared with labels where all classes count alike."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training.objectives import equally, scores


def test_five_guesses_are_scored_above_ten_classes():
    assert set(scores(jnp.zeros((1, 10)), jnp.array([0]))) == {"accuracy"}
    assert scores(jnp.zeros((1, 11)), jnp.array([4])) == {"accuracy": 0.0, "top5": 1.0}


def test_a_mixed_target_takes_the_place_of_the_label_in_the_loss_only():
    logits = jnp.log(jnp.array([[1.0, 3.0]]))
    batch = {"label": jnp.array([1]), "target": jnp.array([[0.5, 0.5]])}
    loss, metrics = equally(0.0).in_training(logits, batch)
    assert float(loss.value) == pytest.approx((np.log(4) + np.log(4 / 3)) / 2, rel=1e-6)
    assert float(metrics["accuracy"].value) == 1.0
    assert equally(0.5).in_evaluation(logits, batch)["loss"].tolist() == [pytest.approx(np.log(4 / 3), rel=1e-5)]
