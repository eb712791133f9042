"""Language modelling: each token from those before it, and the perplexity of a whole set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training import RunObjective, language_modeling, with_perplexity


class Repeating:
    """A model that expects each token to come again: a logit of 2 for it, 0 for the three others, in float16."""

    def __call__(self, tokens):
        self.seen = tokens
        return 2 * jax.nn.one_hot(tokens, 4, dtype=jnp.float16)


OBJECTIVE = RunObjective(language_modeling(), complete=with_perplexity)
TOKENS = {"tokens": jnp.array([[1, 1, 1, 2], [3, 3, 0, 0]], jnp.int32)}


def test_the_model_sees_all_but_the_last_token_and_predicts_all_but_the_first():
    model = Repeating()
    values = OBJECTIVE.measure(model, TOKENS)
    assert model.seen.tolist() == [[1, 1, 1], [3, 3, 0]]
    right, wrong = np.log(np.exp(2) + 3) - 2, np.log(np.exp(2) + 3)
    np.testing.assert_allclose(values["loss"], [(2 * right + wrong) / 3] * 2, rtol=1e-6)
    np.testing.assert_allclose(values["accuracy"], [2 / 3, 2 / 3], rtol=1e-6)
    assert values["loss"].dtype == jnp.float32


def test_the_loss_is_the_mean_over_tokens():
    loss, metrics = OBJECTIVE.loss(Repeating(), TOKENS, jax.random.key(0))
    assert float(loss.value) == pytest.approx(float(np.mean(OBJECTIVE.measure(Repeating(), TOKENS)["loss"])))
    assert float(metrics["accuracy"].value) == pytest.approx(2 / 3)


def test_label_smoothing_is_for_training_only():
    smoothed, plain = RunObjective(language_modeling(label_smoothing=0.5)), OBJECTIVE
    assert float(smoothed.loss(Repeating(), TOKENS, jax.random.key(0))[0].value) != pytest.approx(
        float(plain.loss(Repeating(), TOKENS, jax.random.key(0))[0].value), rel=1e-2
    )
    np.testing.assert_array_equal(
        smoothed.measure(Repeating(), TOKENS)["loss"], plain.measure(Repeating(), TOKENS)["loss"]
    )


def test_perplexity_is_exp_of_the_mean_loss_of_all_tokens():
    sums = {"loss": np.float64(6.0), "accuracy": np.float64(1.0), "count": np.float64(2.0)}
    assert OBJECTIVE.conclude(sums) == {"loss": 3.0, "accuracy": 0.5, "perplexity": pytest.approx(20.0855369)}
    assert OBJECTIVE.conclude(sums | {"loss": np.float64(1e4)})["perplexity"] == np.inf
