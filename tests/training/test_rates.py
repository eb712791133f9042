"""Learning rates of parts: factors by pattern, and decay from layer to layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.commands import fields_of, make_task, prepared_shapes
from mpjax.config import Optimizer, load_config
from mpjax.errors import UsageError
from mpjax.training import depths_of, factors_of, plan_precision, scale_by_path, update_rule


VIT = (
    "--model.name vit_ti16 --model.width 8 --model.heads 2 --model.depth 3 --model.patch 4 "
    "--data.name synthetic:8x8x3:5"
)
GPT = (
    "--model.name gpt2 --model.width 8 --model.heads 2 --model.depth 2 --task language_modeling --data.name docstrings "
    "--data.length 8"
)


def factors(flags):
    config = load_config(f"{flags} --precision.policy float32".split())
    fields = fields_of(config)
    task = make_task(config, plan_precision(config.precision), fields)
    return factors_of(config.optimizer, task, prepared_shapes(task, fields))


def test_factors_are_of_the_first_pattern_that_matches():
    found = factors("--model.name mlp --data.name synthetic:4x4x1:3 --optimizer.rates head/bias 3 head/* 10 layers/0 1")
    assert found == {"head/bias": 3, "head/kernel": 10}


def test_a_factor_of_what_is_frozen_is_an_error():
    flags = "--model.name mlp --data.name synthetic:4x4x1:3 --training.freeze head --optimizer.rates"
    for pattern in ("head/*", "head", "head/bias"):
        said = f"--optimizer.rates {pattern}: all that it matches is frozen by --training.freeze, such as head/"
        with pytest.raises(UsageError, match=re.escape(said)):
            factors(f"{flags} {pattern} 10")


def test_a_factor_of_some_that_are_frozen_is_of_the_others():
    flags = "--model.name mlp --data.name synthetic:4x4x1:3 --training.freeze head/bias --optimizer.rates head 10"
    assert factors(flags) == {"head/kernel": 10}


QUICK = {("", "blocks/*"), ("--model.scan_blocks", "blocks/2/mlp")}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        pytest.param(form, pattern, marks=[] if (form, pattern) in QUICK else pytest.mark.slow)
        for form in ("", "--model.scan_blocks")
        for pattern in ("blocks/*", "blocks/2/mlp", "blocks/?/mlp/up/*", "type:Linear")
    ],
)
def test_a_factor_of_frozen_blocks_is_an_error(form, pattern):
    with pytest.raises(UsageError, match=r"all that it matches is frozen by --training.freeze, such as blocks/[02]/"):
        factors(f"{VIT} {form} --training.freeze blocks/* head/* --optimizer.rates {pattern} 0.1")


@pytest.mark.parametrize("form", ["", "--model.scan_blocks"])
def test_frozen_blocks_have_no_factor(form):
    flags = "--training.freeze blocks/*/mlp --optimizer.layer_decay 0.5 --optimizer.rates blocks 3"
    found = factors(f"{VIT} {form} {flags}")
    assert {path.split("/")[2] for path in found if path.startswith("blocks")} == {"attention", "norm1", "norm2"}
    assert found["blocks/2/norm1/scale"] == 1.5


@pytest.mark.parametrize("form", ["", "--model.scan_blocks"])
def test_rates_decay_from_the_head_through_the_blocks_to_the_embedding(form):
    """Three blocks: the head and the last norm 1, blocks 0.5, 0.25 and 0.125, what comes before 0.0625."""
    found = factors(f"{VIT} {form} --optimizer.layer_decay 0.5")
    by_part = {}
    for path, factor in found.items():
        by_part.setdefault("/".join(path.split("/")[: 2 if path.startswith("blocks") else 1]), set()).add(factor)
    blocks = {"blocks/0": {0.125}, "blocks/1": {0.25}, "blocks/2": {0.5}}
    assert {part: values for part, values in by_part.items() if part in blocks} == blocks
    before = by_part.keys() - blocks.keys()
    assert len(before) >= 2
    assert {value for part in before for value in by_part[part]} == {0.0625}
    assert not any(path.startswith(("head", "norm")) for path in found)


def test_decay_multiplies_the_factors():
    found = factors(f"{VIT} --optimizer.layer_decay 0.5 --optimizer.rates blocks/2/* 3 head/* 10")
    assert {found["head/kernel"], found["blocks/2/mlp/up/bias"]} == {10, 1.5}


def test_a_tied_embedding_comes_before_the_blocks():
    found = factors(f"{GPT} --optimizer.layer_decay 0.5")
    assert {found[path] for path in found if not path.startswith("blocks")} == {0.125}


OWN_FILE = """
from flax import nnx

class Flat(nnx.Module):
    def __init__(self, fields, *, rngs):
        self.head = nnx.Linear(16, 3, rngs=rngs)

class Two(Flat):
    def __init__(self, fields, *, rngs):
        super().__init__(fields, rngs=rngs)
        self.down, self.up = (nnx.List([nnx.Linear(2, 2, rngs=rngs)]) for _ in range(2))

class Unused(Flat):
    def __init__(self, fields, *, rngs):
        super().__init__(fields, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs)])

    def __call__(self, images):
        return self.head(images.reshape(images.shape[0], -1))
"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Flat", r"the model has no blocks \(modules in a list\)"),
        ("Two", r"the model has blocks in several lists \(down, up\)"),
        ("Unused", "the model does not call blocks/0"),
    ],
)
def test_a_model_without_one_list_of_blocks_is_an_error(model, message, tmp_path):
    (tmp_path / "own.py").write_text(OWN_FILE)
    flags = f"--model.name {tmp_path / 'own.py'}:{model} --data.name synthetic:4x4x1:3 --optimizer.layer_decay 0.5"
    with pytest.raises(UsageError, match=f"--optimizer.layer_decay: {message}.*write --optimizer.rates"):
        factors(flags)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_update_is_multiplied(name):
    """Weight decay too, as the learning rate multiplies it."""
    params = {"head/kernel": jnp.array([[1.0, -2.0]]), "body/kernel": jnp.array([[1.0, -2.0]])}
    config = Optimizer(name=name, weight_decay=0.1)
    plain, scaled = (update_rule(config, lambda count: 0.1, factors=f) for f in ({}, {"head/kernel": 4.0}))
    with jax.numpy_dtype_promotion("standard"):
        wanted, _ = plain.update(params, plain.init(params), params)
        found, _ = scaled.update(params, scaled.init(params), params)
    np.testing.assert_array_equal(found["head/kernel"], 4 * wanted["head/kernel"])
    np.testing.assert_array_equal(found["body/kernel"], wanted["body/kernel"])


def test_rows_of_a_stack_have_their_own_factors():
    tx = scale_by_path({"blocks/1/kernel": 2.0, "blocks/0/bias": 3.0, "blocks/1/bias": 3.0}, {"blocks": 2})
    shapes = {"blocks/all/kernel": (2, 1, 2), "blocks/all/bias": (2, 2), "blocks/1/kernel": 1}
    ones = {path: jnp.ones(shape) for path, shape in shapes.items()}
    found, state = tx.update(ones, tx.init(ones), ones)
    assert found["blocks/all/kernel"].tolist() == [[[1, 1]], [[2, 2]]]
    assert found["blocks/all/bias"].tolist() == [[3, 3], [3, 3]]
    assert found["blocks/1/kernel"].tolist() == [2]  # a diagnosis looks at blocks one by one
    assert state == optax.EmptyState()


def test_depths_count_from_the_top():
    config = load_config(f"{VIT} --precision.policy float32".split())
    fields = fields_of(config)
    task = make_task(config, plan_precision(config.precision), fields)
    depths = depths_of(task, prepared_shapes(task, fields))
    assert {depths[f"blocks/{number}/norm1/scale"] for number in range(3)} == {3, 2, 1}
    assert (depths["head/kernel"], depths["norm/scale"], max(depths.values())) == (0, 0, 4)
