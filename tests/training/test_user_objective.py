"""Objectives of the user's own: values per example in, means over batches, devices and sets out.

Objectives and augmentations that nothing can be learnt with are errors before a run has a folder.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.commands import run
from mpjax.config import Config, Data, Duration, Report, Training
from mpjax.errors import UsageError
from mpjax.precision import get_policy
from mpjax.training import (
    Mean,
    RunObjective,
    checked_objective,
    classification,
    text_classification,
    used_arguments,
    weighted_sums,
)


BATCH = {"x": jnp.arange(4.0), "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
KEY = jax.random.key(0)
X = jax.ShapeDtypeStruct((3,), jnp.float32)
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), np.uint8)
ARRAYS = {"image": IMAGES, "label": np.arange(8) % 2}


def objective(function) -> Any:
    return RunObjective(checked_objective(function, name="NAME"))


def test_loss_and_metrics_are_means_over_examples():
    loss, metrics = objective(lambda model, batch, key: {"loss": batch["x"], "big": batch["x"] > 2}).loss(
        None, BATCH, KEY
    )
    assert (float(loss.total), float(loss.weight)) == (6.0, 4.0)
    assert float(metrics["big"].value) == 0.25


def test_terms_of_examples_are_weighted_by_their_number():
    """Tokens: two examples of 3 and 1 terms have the mean of 4 terms, not the mean of two means."""
    terms = Mean(jnp.array([6.0, 10.0]), jnp.array([3.0, 1.0]))
    loss, _ = objective(lambda model, batch: {"loss": terms}).loss(None, {"x": jnp.zeros(2)}, KEY)
    assert float(loss.value) == 4.0


def test_a_set_is_evaluated_by_its_sums():
    own = objective(lambda model, batch, key: {"loss": batch["x"], "rate": Mean(batch["x"], jnp.array([1.0, 2, 3, 0]))})
    assert own.conclude(weighted_sums(own.measure(None, BATCH), BATCH)) == {"loss": 1.0, "rate": 0.5}


def test_the_key_is_none_in_evaluation():
    seen = []

    def function(model, batch, key):
        seen.append(key)
        return {"loss": batch["x"]}

    own = objective(function)
    own.loss(None, BATCH, KEY)
    own.measure(None, BATCH)
    assert seen == [KEY, None]


def test_outputs_are_no_metric():
    own = objective(lambda model, batch: {"loss": batch["x"], "outputs": {"any": jnp.zeros((4, 2))}})
    assert list(own.measure(None, BATCH)) == ["loss"]
    assert own.loss(None, BATCH, KEY)[1] == {}


@pytest.mark.parametrize(
    "function", [classification(get_policy("float32")), text_classification()], ids=["classification", "text"]
)
def test_the_objective_of_a_task_can_be_a_users_own(function):
    def model(images, lengths=None):
        return images

    batch = {"label": jnp.array([1, 0]), "length": jnp.ones(2), "image": jnp.eye(2), "tokens": jnp.eye(2)}
    loss, metrics = objective(function).loss(model, batch, KEY)
    assert (round(float(loss.value), 6), float(metrics["accuracy"].value)) == (1.313262, 0.0)
    assert objective(function).measure(model, batch)["loss"].tolist() == pytest.approx([1.313262, 1.313262])


def test_half_precision_is_summed_in_float32():
    """Forty values of 2,000 are 80,000, beyond float16."""
    batch = {"x": jnp.full(40, 2000, jnp.float16)}
    loss, _ = objective(lambda model, batch: {"loss": batch["x"]}).loss(None, batch, KEY)
    assert loss.total.dtype == jnp.float32
    assert float(loss.total) == 80000.0


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: x.mean(), "NAME returned .*; wanted a dict with `loss`"),
        (lambda x: {"cost": x}, "NAME returned a mapping of cost; wanted a dict with `loss`"),
        (lambda x: {"loss": None}, r"NAME: loss is None: wanted one value per example, \[4\]"),
        (lambda x: {"loss": x.mean()}, r"NAME: loss has shape \(\) for a batch of 4: wanted one value per example"),
        (lambda x: {"loss": x[:3]}, r"NAME: loss has shape \(3,\)"),
        (lambda x: {"loss": x, "finite": x}, "finite is the name of something else"),
    ],
)
def test_other_results_are_errors_that_say_what_is_wanted(result, said):
    own = objective(lambda model, batch: result(batch["x"]))
    with pytest.raises(UsageError, match=said):
        own.loss(None, BATCH, KEY)
    with pytest.raises(UsageError, match=said):
        own.measure(None, BATCH)


def test_a_function_of_other_parameters_is_an_error():
    with pytest.raises(UsageError, match=r"wanted a function of \(model, batch\) or \(model, batch, key\)"):
        objective(lambda model: {})


def test_an_argument_counts_if_a_result_depends_on_its_value():
    assert used_arguments(lambda x, y: jnp.sin(x["a"]) + y.size, {"a": X, "b": X}, X) == (
        {"a": True, "b": False},
        False,
    )


def test_the_gradient_of_integers_depends_on_nothing():
    assert used_arguments(jax.grad(lambda x: jnp.argmax(x).astype(jnp.float32)), X) == (False,)
    assert used_arguments(jax.grad(lambda x: jnp.sum(jax.lax.stop_gradient(x) ** 2)), X) == (False,)
    assert used_arguments(jax.grad(lambda x: jnp.sum(x**2)), X) == (True,)


def test_a_compiled_function_is_one_operation_that_uses_all_it_is_given():
    assert used_arguments(jax.jit(lambda x, y: x + 1), X, X) == (True, True)


class Net(nnx.Module):
    def __init__(self, fields, *, rngs):
        self.layer = nnx.Linear(16, 2, rngs=rngs)
        self.rest = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, images):
        return self.rest(self.layer(images.reshape(len(images), -1)))


def config(folder, freeze=(), **data):
    return Config(
        output_dir=str(folder / "run"),
        data=Data(**{"num_classes": 2, "batch_size": 4, "eval_batch_size": 8} | data),
        training=Training(freeze=freeze),
        report=Report(tensorboard=False, plot=False),
        steps=Duration(1),
    )


def refused(folder, said, *, freeze=(), augment=None, objective=None, **data):
    with pytest.raises(UsageError, match=said):
        run(
            config(folder, freeze, **data),
            model=Net,
            source=(ARRAYS, ARRAYS),
            augment=augment,
            objective=objective,
        )
    assert not (folder / "run").exists()


def entropy(model, batch):
    logits = model(batch["image"])
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["label"], 2), -1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: jnp.ones(len(batch["label"])),
        lambda model, batch: model(batch["image"]).argmax(-1).astype(jnp.float32),
        lambda model, batch: jnp.round(jax.lax.stop_gradient(model(batch["image"])))[:, 0],
    ],
    ids=["constant", "argmax", "stopped"],
)
def test_a_loss_whose_gradient_is_zero_is_an_error(tmp_path, loss):
    said = "--training.objective python:.*: the loss does not depend on any parameter that is trained"
    refused(tmp_path, said, objective=lambda model, batch: {"loss": loss(model, batch)})


def test_a_loss_of_frozen_parameters_alone_is_an_error(tmp_path):
    def of_one(model, batch):
        return {"loss": model.layer(batch["image"].reshape(len(batch["image"]), -1)).mean(-1)}

    refused(tmp_path, "does not depend on any parameter that is trained", freeze=("layer",), objective=of_one)


def test_a_loss_of_integers_is_an_error(tmp_path):
    said = "loss is int32: wanted floating point, because no gradient flows through integers"
    refused(tmp_path, said, objective=lambda model, batch: {"loss": batch["label"]})


@pytest.mark.slow
def test_a_constant_gradient_is_one(tmp_path):
    """The sum of a layer's bias: its gradient depends on no value, and is not zero."""
    summary = run(
        config(tmp_path),
        model=Net,
        source=(ARRAYS, ARRAYS),
        objective=lambda model, batch: {"loss": jnp.zeros(len(batch["label"])) + jnp.sum(model.rest.bias[...])},
    )
    assert summary["steps"] == 1


@pytest.mark.parametrize(("setting", "value"), [("mixup", 0.2), ("cutmix", 1.0)])
def test_an_objective_that_does_not_use_mixed_labels_is_an_error_where_images_are_mixed(tmp_path, setting, value):
    said = rf"--data.{setting} {value}: images are mixed, and --training.* batch\['target'\] \[2\] per example"
    refused(tmp_path, said, objective=lambda model, batch: {"loss": entropy(model, batch)}, **{setting: value})


@pytest.mark.slow
def test_an_objective_that_uses_mixed_labels_trains(tmp_path):
    seen = []

    def mixed(model, batch):
        seen.append("target" in batch)
        target = batch.get("target", jax.nn.one_hot(batch["label"], 2))
        return {"loss": -jnp.sum(jax.nn.log_softmax(model(batch["image"])) * target, -1)}

    summary = run(config(tmp_path, mixup=0.2), model=Net, source=(ARRAYS, ARRAYS), objective=mixed)
    assert summary["steps"] == 1
    assert set(seen) == {True, False}


def test_an_augmentation_may_change_the_shape_of_images_only_if_the_model_can_be_given_it(tmp_path):
    said = r"--data.augment python:.* returned image \[2, 4, 1\] in place of \[4, 4, 1\] per example, of which the loss"
    refused(tmp_path, said, augment=lambda batch, key: {**batch, "image": batch["image"][:, :2]})


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (lambda batch: batch, r"takes \(batch\): it is called with \(batch, key\)"),
        (
            lambda batch, key: batch["imag"],
            r"--data.augment python:.* failed: KeyError: 'imag' \(test_.*, line",
        ),
        (lambda batch, key: None, "returned NoneType; wanted a dict of the same fields"),
    ],
)
def test_an_augmentation_that_fails_is_an_error_with_its_line(tmp_path, augment, said):
    refused(tmp_path, said, augment=augment, flip=True, alternate_flips=True)


def test_an_objective_that_fails_is_an_error_with_its_line(tmp_path):
    def uses_key(model, batch, key):
        return {"loss": entropy(model, batch) * jax.random.uniform(key)}

    said = r"--training.objective python:.*uses_key failed \(in evaluation, where `key` is None\): .*, line \d+\)"
    refused(tmp_path, said, objective=uses_key)
    refused(tmp_path, r"failed: KeyError: 'lable'", objective=lambda model, batch: {"loss": batch["lable"]})
