"""Every pair of choices for an optimizer and its precision has a step whose state keeps its form, or is refused."""

import itertools
import random

import jax
import pytest

from mpjax.commands import planned_step
from mpjax.config import load_config
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.training import make_mesh


CHOICES = {
    "precision.policy": [
        *("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "O1", "O3", "float64", "mixed_float8"),
        "params=float16,compute=bfloat16,output=float32",
    ],
    "precision.master_weights": ["auto", "on", "off", "stochastic", "kahan"],
    "precision.loss_scale": ["auto", "none", "8.0", "dynamic"],
    "optimizer.moments": ["float32", "bfloat16", "float8"],
    "optimizer.name": ["sgd", "adamw", "lamb", "muon", "lion", "adafactor", "adabelief", "rmsprop"],
    "training.accumulate": ["1", "2"],
    "training.ema": ["0", "0.9"],
}


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def rows():
    """Rows of choices in which every pair stands: each is the best of forty at random."""
    draw = random.Random(0)
    settings = itertools.combinations(CHOICES, 2)
    left = {((a, x), (b, y)) for a, b in settings for x in CHOICES[a] for y in CHOICES[b]}
    while left:
        some = draw.choices(sorted(left), k=40)
        tried = [{name: draw.choice(values) for name, values in CHOICES.items()} | dict(pair) for pair in some]
        best = max(tried, key=lambda row: len(left & pairs_of(row)))
        left -= pairs_of(best)
        yield best


def form(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def outcome(row):
    flags = [word for name, value in row.items() for word in (f"--{name}", value)]
    data = ["--data.name", "synthetic:8x8x1:10", "--data.batch_size", "8", "--steps", "100"]
    model = ["--model.name", "mlp", "--model.width", "64", "--model.depth", "3"]
    steady = ["--optimizer.schedule", "constant", "--optimizer.warmup", "0"]
    try:
        step = planned_step(load_config([*data, *model, *steady, *flags]), labelled_images(10, (8, 8, 1)))
    except UsageError:
        return "refused"
    with (
        step.x64_if_float64(),
        jax.numpy_dtype_promotion("standard"),
    ):  # with 64 bits, an argmax is int64, and labels int32
        train_step, (state, batch) = step.on(make_mesh(jax.devices()[:1]))
        after, _ = jax.eval_shape(train_step, state, batch)
    return "keeps its form" if form(after) == form(state) else "changes its form"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_pair_of_choices_has_a_step_or_is_refused(part):
    found = {tuple(row.values()): outcome(row) for row in itertools.islice(rows(), part, None, 8)}
    assert {row: what for row, what in found.items() if what not in ("refused", "keeps its form")} == {}
    assert "keeps its form" in found.values()


@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_moments_of_float64_parameters_are_not_said_to_be_narrower(moments):
    with pytest.raises(UsageError, match=f"--optimizer.moments {moments}: moments of float64 parameters are float64"):
        planned_step(
            load_config(["--precision.policy", "float64", "--optimizer.moments", moments, "--model.name", "mlp"]),
            labelled_images(10, (8, 8, 1)),
        )
