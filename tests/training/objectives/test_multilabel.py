"""Several labels at once: sigmoid cross entropy in float32, and F1 scores of a whole set."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from mpjax.precision import get_policy
from mpjax.training import RunObjective, multilabel_in_order, multilabel_objective, sigmoid_cross_entropy


def test_the_loss_is_that_computed_by_hand():
    loss = sigmoid_cross_entropy(jnp.array([[0.0, math.log(3)], [0.0, 0.0]]), jnp.array([[1, 0], [1, 0]]))
    np.testing.assert_allclose(loss, [(math.log(2) + math.log(4)) / 2, math.log(2)], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_loss_has_float32_and_stays_finite(dtype):
    loss = sigmoid_cross_entropy(jnp.array([[20.0, -60000.0, 60000.0]], dtype), jnp.array([[1, 1, 1]]))
    assert loss.dtype == jnp.float32
    # exp(-20) underflows in a float16 sum with 1.
    large = float(jnp.asarray(60000, dtype))
    assert loss.tolist() == [pytest.approx((math.exp(-20) + large) / 3, rel=1e-6)]
    far = jax.grad(lambda x: sigmoid_cross_entropy(x, jnp.array([[1, 0]]))[0])(jnp.array([[jnp.inf, -jnp.inf]]))
    assert far.tolist() == [[0, 0]]
    assert float(sigmoid_cross_entropy(jnp.array([[20.0]], dtype), jnp.array([[1]]))[0]) == pytest.approx(
        math.exp(-20), rel=1e-5
    )


class Logits:
    """A model whose logits are the inputs."""

    def __call__(self, row):
        return row


def set_metrics(logits, labels, batches):
    objective = RunObjective(multilabel_objective(get_policy("float32")), complete=multilabel_in_order)
    sums = []
    for rows in batches:
        values = objective.measure(Logits(), {"row": logits[rows], "labels": labels[rows]})
        sums.append(jax.tree.map(lambda x: np.asarray(x, np.float64).sum(axis=0), values) | {"count": len(rows)})
    return objective.conclude(jax.tree.map(lambda *x: sum(x), *sums))


def test_metrics_are_scikit_learns_of_the_whole_set():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, (70, 4)) * np.array([1, 1, 0, 1])
    logits = rng.normal(size=(70, 4)) + labels - np.array([0, 0, 0, 1])
    values = set_metrics(jnp.float32(logits), jnp.int32(labels), np.split(np.arange(70), [64, 67]))
    assert list(values) == ["loss", "f1", "macro_f1", "exact"]
    predicted = logits > 0
    assert values["f1"] == pytest.approx(sklearn_metrics.f1_score(labels, predicted, average="micro"))
    macro = sklearn_metrics.f1_score(labels, predicted, average="macro", zero_division=0)
    assert values["macro_f1"] == pytest.approx(macro)
    assert values["exact"] == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    expected = sklearn_metrics.log_loss(labels.reshape(-1), 1 / (1 + np.exp(-logits.reshape(-1))))
    assert values["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_label_that_neither_occurs_nor_is_predicted_has_no_part_in_the_mean():
    labels = jnp.array([[1, 0], [1, 0], [0, 0]])
    values = set_metrics(jnp.array([[1.0, -1.0], [-1.0, -1.0], [1.0, -1.0]]), labels, [np.arange(3)])
    assert (values["macro_f1"], values["f1"], values["exact"]) == (0.5, 0.5, pytest.approx(1 / 3))


def test_a_logit_that_is_not_finite_is_wrong():
    labels = jnp.array([[1, 0], [1, 0]])
    values = set_metrics(jnp.array([[jnp.nan, -1.0], [jnp.inf, jnp.nan]]), labels, [np.arange(2)])
    assert (values["exact"], values["f1"]) == (0, 0)
