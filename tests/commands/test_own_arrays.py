"""The user's code may keep arrays: in its files, in functions, and as attributes of a model."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.cli import train
from mpjax.commands import make_task
from mpjax.config import Config, Model, Precision, load_function
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.training import Task, plan_precision, take_apart, trace


# Arrays of a file, whichever trace imports it first

IN_FILES = {
    "range": ("jnp.arange(3)", [0, 1, 2]),
    "random key": ("jax.random.key_data(jax.random.key(5))", [0, 5]),
    "jitted": ("jax.jit(lambda x: x + 1)(jnp.ones(2))", [2, 2]),
    "mapped relu": ("jax.vmap(jax.nn.relu)(jnp.array([-1.0, 2.0]))", [0, 2]),
    "gradient": ("jax.grad(lambda x: x**2)(3.0)", 6),
    "loop": ("jax.lax.fori_loop(0, 4, lambda i, x: x + i, 0)", 6),
    "branch on a value": ("jnp.ones(2) if jnp.ones(()) > 0 else None", [1, 1]),
    "NumPy": ("np.asarray(jnp.ones(2))", [1, 1]),
    "variable that changes": ("changed(nnx.Rngs(0))", 1),
}
TRACES = {
    "shapes": lambda f: jax.eval_shape(f, 1.0),
    "jit": lambda f: jax.jit(f)(1.0),
    "gradient": lambda f: jax.grad(f)(1.0),
    "map": lambda f: jax.vmap(f)(jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, jnp.ones(2)),
}


@pytest.mark.parametrize("of", TRACES)
@pytest.mark.parametrize("kind", IN_FILES)
def test_arrays_of_a_file_have_values_after_the_trace_that_imported_it(tmp_path, kind, of):
    array, expected = IN_FILES[kind]
    file = tmp_path / "own.py"
    file.write_text(
        "import jax, jax.numpy as jnp, numpy as np\nfrom flax import nnx\n"
        "def changed(rngs):\n    rngs.params()\n    return rngs.params.count[...]\n"
        f"ARRAY = {array}\ndef get(): return ARRAY\n"
    )
    loaded = []

    def f(x):
        loaded.append(load_function(f"{file}:get", flag="--model.name"))
        return x

    TRACES[of](f)
    np.testing.assert_array_equal(np.asarray(loaded[0]()), expected)


# Arrays of a model

MODEL = """
import functools
import jax, jax.numpy as jnp, numpy as np
from flax import nnx

ORDER = jnp.array([1, 0])
KEY = jax.random.key(5)

@functools.cache
def table():
    return jnp.array([1, 0])

class Net(nnx.Module):
    def __init__(self, fields, *, rngs):
        {keep}
        self.head = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.head({use})
"""
KEPT = {
    "file": ("pass", "x[:, ORDER]"),
    "closure": ("a = jnp.array([1, 0]); self.f = lambda x: x[:, a]", "self.f(x)"),
    "attribute": ("self.a = jnp.array([1, 0])", "x[:, self.a]"),
    "NumPy attribute": ("self.a = np.array([1, 0])", "x[:, self.a]"),
    "attribute of a submodule": ("self.m = nnx.Module(); self.m.a = jnp.array([1, 0])", "x[:, self.m.a]"),
    "computed attribute": ("self.a = jnp.argsort(jnp.array([3.0, 2.0]))", "x[:, self.a]"),
}
CONFIG = Config(precision=Precision(policy="float32"))


def task_of(folder: pathlib.Path, keep: str, use: str) -> Task:
    (folder / "own.py").write_text(MODEL.format(keep=keep, use=use))
    config = dataclasses.replace(CONFIG, model=Model(name=f"{folder}/own.py:Net"))
    return make_task(config, plan_precision(CONFIG.precision), labelled_images(2, (1, 2, 1)))


def logits_of(task: Task, x: jax.Array) -> tuple[jax.Array, dict]:
    """The logits of a new model, from a program that is compiled ahead of time, and the model's parameters."""

    @jax.jit
    def initial(key):
        return take_apart(task.make_model(key))[1:]

    params, stats = initial(jax.random.key(0))
    jax.eval_shape(task.structure.assemble(params, stats), x)  # another trace, as a run has several
    forward = jax.jit(lambda params, stats, x: task.structure.assemble(params, stats)(x))
    return trace(forward, params, stats, x).lower().compile()(params, stats, x), params


X = jnp.array([[1.0, 2.0], [3.0, 5.0]])


@pytest.mark.parametrize("kind", KEPT)
def test_a_model_may_keep_arrays(tmp_path, kind):
    logits, params = logits_of(task_of(tmp_path, *KEPT[kind]), X)
    expected = np.array([[2.0, 1.0], [5.0, 3.0]]) @ np.asarray(params["head/kernel"])  # biases are 0
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


def test_an_attribute_that_is_drawn_at_random_depends_on_the_seed(tmp_path):
    task = task_of(tmp_path, "self.a = jax.random.uniform(rngs.noise(), (2,))", "x")
    draws = [jax.jit(lambda key: take_apart(task.make_model(key))[2]["a"])(jax.random.key(seed)) for seed in (0, 1)]
    assert not np.array_equal(*draws)


def test_a_key_of_a_file_draws_the_same_numbers(tmp_path):
    task = task_of(tmp_path, "pass", "0 * x + jax.random.uniform(KEY, x.shape)")
    logits, params = logits_of(task, X)
    expected = jax.random.uniform(jax.random.key(5), (2, 2)) @ params["head/kernel"]
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


def test_a_random_key_as_an_attribute_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="keeps a random key, key, which a checkpoint cannot hold"):
        task_of(tmp_path, "self.key = jax.random.key(5)", "x")


def test_a_complex_array_as_an_attribute_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="keeps a complex array, turns, which a checkpoint cannot hold"):
        task_of(tmp_path, "self.turns = jnp.ones(2, complex)", "x")


ESCAPED = {
    "cache": ("pass", "x[:, table()]", "own.py:11:11 (table)"),
    "closure over a random array": (
        "a = jax.random.uniform(rngs.noise(), (1, 2)); self.f = lambda x: x * a",
        "self.f(x)",
        "own.py:15:12 (Net.__init__)",
    ),
}


@pytest.mark.parametrize("kind", ESCAPED)
def test_an_array_that_escapes_from_a_trace_is_an_error_that_names_its_line(tmp_path, kind):
    *code, where = ESCAPED[kind]
    with pytest.raises(UsageError, match=rf"keeps an array .* from one trace to the next.*{re.escape(where)}"):
        logits_of(task_of(tmp_path, *code), X)


# A whole run

PARTS = """
import jax, jax.numpy as jnp, optax
from flax import nnx

ORDER, WEIGHTS, RATES = jnp.arange(64), jnp.linspace(0.5, 1.0, 10), jnp.array([0.1, 0.2])
FACTOR, SHIFT, KEY = jnp.array(0.9), jnp.full((1, 8, 8, 1), 0.5), jax.random.key(3)

class Net(nnx.Module):
    def __init__(self, fields, *, rngs):
        offsets = jnp.arange(64)
        self.take, self.offsets = lambda x: x[:, offsets], jnp.arange(64)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.take(x.reshape(x.shape[0], -1)[:, ORDER])[:, self.offsets])

def loss(model, batch, key):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return {"loss": losses * WEIGHTS[batch["label"]]}

def rate():
    return lambda step: RATES[jnp.minimum(step, 1)]

def rule(learning_rate):
    return optax.chain(optax.scale(FACTOR), optax.scale_by_learning_rate(learning_rate))

def augment(batch, key):
    noise = jax.random.uniform(KEY, SHIFT.shape)
    return {**batch, "image": batch["image"] + (SHIFT * noise).astype(batch["image"].dtype)}
"""


def test_all_code_of_a_run_may_keep_arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("own.py").write_text(PARTS)
    parts = "--model.name own.py:Net --training.objective own.py:loss --optimizer.schedule own.py:rate"
    parts += " --optimizer.name own.py:rule --data.augment own.py:augment --precision.policy mixed_bfloat16"
    parts += " --training.steps_per_call 2 --steps 2 --data.name synthetic:8x8x1:10 --output_dir run"
    assert train(parts.split()) == 0
    assert {"receipt.json", "summary.json"} <= {path.name for path in pathlib.Path("run").iterdir()}
