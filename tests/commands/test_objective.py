"""Which objective a run has, and the names of its metrics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.commands import make_task, metrics_of, with_parts
from mpjax.config import Config, Model, Precision
from mpjax.data import Image, Mask, labelled_images
from mpjax.errors import UsageError
from mpjax.training import plan_precision, take_apart


CONFIG = Config(model=Model(name="mlp"))
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


ROWS = np.zeros(4000, int)
BATCH = {"image": np.linspace(0, 1, 64, dtype=np.float32).reshape(4, 4, 4, 1), "label": np.arange(4)}


def layers_of_flax(fields, *, rngs):
    return nnx.Sequential(nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, fields["label"].num_classes, rngs=rngs))


def features(model, batch):
    return model.layers[0](batch["image"].reshape(-1, 16))


def gathered(model, batch):
    hidden = jnp.mean(features(model, batch)[:, ROWS].astype(jnp.float32), 1, keepdims=True)
    return {"loss": jnp.square(model.layers[1](hidden * jnp.ones((1, 8))).astype(jnp.float32)).mean(-1)}


def scattered(model, batch):
    hidden = features(model, batch)[:, ROWS]
    return {"loss": jnp.zeros((len(hidden), 1), hidden.dtype).at[:, ROWS].add(hidden / 4000)[:, 0].astype(jnp.float32)}


def ones(logits, batch):
    narrow = jnp.ones((len(logits), 4000), jnp.bfloat16)
    return jnp.zeros((len(logits), 1), jnp.bfloat16).at[:, ROWS].add(narrow)[:, 0]


def task_in(policy, **parts):
    config = dataclasses.replace(with_parts(CONFIG, **parts), precision=Precision(policy=policy))
    return make_task(config, plan_precision(config.precision), FIELDS)


def gradients(policy, objective):
    built = task_in(policy, model=layers_of_flax, objective=objective)
    structure, params, stats = take_apart(built.make_model(jax.random.key(0)))

    @built.cast
    def loss_of(params):
        return built.objective.loss_of(structure.assemble(params, stats), BATCH, jax.random.key(0))[0].value

    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.grad(loss_of)(params))])


@pytest.mark.parametrize("objective", [gathered, scattered])
def test_sums_of_an_objective_run_in_float32_though_all_layers_are_of_flax(objective):
    narrow, wide = gradients("mixed_bfloat16", objective), gradients("float32", objective)
    assert float(jnp.linalg.norm(narrow - wide) / jnp.linalg.norm(wide)) < 0.02


def test_sums_of_a_metric_run_in_float32_though_the_model_is_of_mpjax():
    built = task_in("mixed_bfloat16", metrics=[ones])
    measured = built.cast(built.objective.measure)(built.make_model(jax.random.key(0)), BATCH)
    np.testing.assert_array_equal(measured["ones"], 4000.0)
