"""Metrics of the user's own: per example, weighted, and those of clu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from mpjax.errors import UsageError
from mpjax.training import Mean, RunObjective, checked_metrics, weighted_sums


LOGITS = jnp.array([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0], [9.0, 0.0, 0.0]])
BATCH = {"label": jnp.array([0, 1, 2, 1])}
PADDED = {**BATCH, "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
PLAIN = RunObjective(lambda model, batch, key: {"loss": LOGITS[:, 0], "outputs": LOGITS})


@struct.dataclass
class Precision:
    """As clu and metrax define metrics: sums, whose quotient is the value."""

    true: jax.Array
    claimed: jax.Array

    def merge(self, other):
        return Precision(self.true + other.true, self.claimed + other.claimed)

    def compute(self):
        return self.true / self.claimed


@struct.dataclass
class Largest:
    value: jax.Array

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value


def precision(logits, batch):
    said = logits.argmax(-1) == 0
    return Precision(jnp.sum(said & (batch["label"] == 0)), jnp.sum(said))


def measured(metrics):
    objective = PLAIN._replace(metrics=checked_metrics(metrics, LOGITS, BATCH, taken=["loss"]))
    return objective.conclude(weighted_sums(objective.measure(None, BATCH), PADDED))


def test_a_value_per_example_is_averaged_under_the_name_of_its_function():
    assert measured({"right": lambda logits, batch: logits.argmax(-1) == batch["label"]}) == {
        "loss": pytest.approx(2 / 3),
        "right": pytest.approx(1 / 3),
    }


def test_several_values_have_their_own_names_and_weights():
    found = measured({"both": lambda logits, batch: {"a": logits[:, 1], "b": Mean(logits[:, 2], batch["label"])}})
    assert found == {"loss": pytest.approx(2 / 3), "a": pytest.approx(5 / 3), "b": 1.0}


def test_a_metric_of_sums_is_computed_from_those_of_the_examples_that_count():
    """Padding claims class 0 too: with it the precision would be 0.5."""
    assert measured({"precision": precision})["precision"] == 1.0


def test_a_metric_whose_merge_does_not_add_is_an_error():
    with pytest.raises(UsageError, match="merging two Largest does not add"):
        measured({"largest": lambda logits, batch: Largest(logits.max())})


def computing(compute):
    """A metric of one sum, [B], of which `compute` makes the value."""

    @struct.dataclass
    class Own:
        value: jax.Array

        def merge(self, other):
            return Own(self.value + other.value)

        def compute(self):
            return compute(self.value)

    return {"own": lambda logits, batch: Own(logits.sum())}


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda x: jnp.stack([x, x]), r"own: compute\(\) of Own returned an array \(2,\): wanted a number"),
        (lambda x: {"a": x}, r"own: compute\(\) of Own returned a dict: wanted a number; return one metric for each"),
        (lambda x: None, r"own: compute\(\) of Own returned None: wanted a number"),
        (lambda x: x.total, r"own: compute\(\) of Own failed: AttributeError: .*total.* \(test_metrics.py, line \d+\)"),
    ],
)
def test_what_is_computed_of_sums_is_tried_before_a_run(compute, said):
    with pytest.raises(UsageError, match=said):
        measured(computing(compute))


def test_a_division_of_pythons_numbers_by_zero_is_nan():
    """The logits of the examples that count add up to 10."""
    own = computing(lambda x: 1 / (float(x) - 10.0))
    assert np.isnan(measured(own)["own"])
    assert np.isfinite(measured(computing(lambda x: 1 / (float(x) - 11.0)))["own"])
    assert np.isfinite(measured(computing(lambda x: 1 / x))["own"])


def test_a_division_of_pythons_numbers_by_zero_is_no_error_before_a_run():
    assert measured(computing(lambda x: 1 / (float(x) - 1.0)))["own"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": lambda logits, batch: logits[:, 0]}, "there is a metric loss already"),
        ({"mean": lambda logits, batch: logits[:, 0].mean()}, r"mean has shape \(\) for a batch of 4"),
        (
            {"none": lambda logits, batch: None},
            r"metrics none returned None: wanted one value per example, \[4\], a dict",
        ),
        ({"text": lambda logits, batch: "0.5"}, "text returned a str: wanted one value"),
        ({"many": lambda logits, batch: [logits[:, 0], logits[:, 1]]}, "many returned a list: wanted one value"),
        ({"empty": lambda logits, batch: {}}, "empty returned an empty dict: wanted one value"),
        ({"number": lambda logits, batch: {3: logits[:, 0]}}, "number returned the name 3: wanted one value"),
        ({"part": lambda logits, batch: {"a": None}}, r"metrics part: a is None: wanted one value per example, \[4\]"),
        ({"part": lambda logits, batch: {"a": logits}}, r"metrics part: a has shape \(4, 3\) for a batch of 4"),
        ({"half": lambda logits, batch: Mean(None, logits[:, 0])}, "metrics half is None: wanted one value"),
        ({"number": lambda logits, batch: 0.5}, r"metrics number has shape \(\) for a batch of 4"),
        ({"wrong": lambda logits, batch: logits[:, 0] / batch["labels"]}, "wrong: KeyError: 'labels'"),
        ({"finite": lambda logits, batch: logits[:, 0]}, "finite is the name of something else"),
    ],
)
def test_other_results_are_errors_that_name_the_metric(metrics, said):
    with pytest.raises(UsageError, match=said):
        measured(metrics)


@pytest.mark.extra
def test_clu():
    clu = pytest.importorskip("clu.metrics", reason="pip install -e '.[parity]'")
    found = measured(
        {"clu": lambda logits, batch: clu.Accuracy.from_model_output(logits=logits, labels=batch["label"])}
    )
    assert found["clu"] == pytest.approx(1 / 3)
