"""Which objective a run has, and the names of its metrics."""

import dataclasses

import jax.numpy as jnp
import pytest

from mpjax.commands.learner import make_task
from mpjax.commands.objective import metrics_of
from mpjax.commands.own_parts import with_parts
from mpjax.config import Config
from mpjax.config.schema import Model
from mpjax.data import Image, Mask, labelled_images
from mpjax.errors import UsageError
from mpjax.training.precision_plan import plan_precision


CONFIG = Config(model=Model(name="mlp", width=4))
FIELDS = labelled_images(12, (4, 4, 1))


def task(**parts):
    config = with_parts(CONFIG, **parts)
    return make_task(config, plan_precision(config.precision), FIELDS)


def right(logits, batch):
    return logits.argmax(-1) == batch["label"]


def halved(model, batch):
    logits = model(batch["image"])
    return {"loss": jnp.square(logits).mean(-1), "outputs": logits}


def test_the_task_has_its_own_metrics():
    assert set(metrics_of(task(), FIELDS)) == {"loss", "accuracy", "top5"}


def test_the_users_metrics_are_added_to_them():
    assert set(metrics_of(task(metrics=[right]), FIELDS)) == {"loss", "accuracy", "top5", "right"}


def union(logits, batch):
    return logits.max((1, 2, 3))


def test_a_users_metric_may_have_any_name_but_those_of_the_tasks_metrics():
    config = with_parts(Config(task="segmentation", model=Model(name="unet", width=4, depth=1)), metrics=[union])
    fields = {"image": Image((8, 8, 1)), "mask": Mask((8, 8), 3)}
    built = make_task(config, plan_precision(config.precision), fields)
    assert set(metrics_of(built, fields)) == {"loss", "accuracy", "iou", "union"}


def test_there_is_one_weight_for_each_class():
    config = dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, class_weights=(1.0, 2.0)))
    said = "--training.class_weights has 2 weights, but 'digits' has 12 classes; wanted one for each class"
    with pytest.raises(UsageError, match=said):
        make_task(config, plan_precision(config.precision), FIELDS)


def test_ignored_labels_change_no_names_of_metrics():
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, ignore_index=(255,)))
    built = make_task(config, plan_precision(config.precision), FIELDS)
    assert set(metrics_of(built, FIELDS)) == {"loss", "accuracy", "top5"}


def test_an_own_objective_takes_the_place_of_the_tasks():
    assert metrics_of(task(objective=halved), FIELDS) == ("loss",)
    assert metrics_of(task(objective=halved, metrics=[right]), FIELDS) == ("loss", "right")


def test_two_metrics_of_one_name_are_an_error():
    with pytest.raises(UsageError, match="wanted functions of different names"):
        task(metrics=[right, right])


def test_a_chunked_loss_needs_a_model_that_computes_logits_in_parts():
    config = dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, chunked_loss=8))
    with pytest.raises(UsageError, match="mlp has no methods `features` and `logits`"):
        make_task(config, plan_precision(config.precision), FIELDS)
