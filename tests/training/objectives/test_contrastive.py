"""Embeddings: the loss over all candidates, wrong negatives, gradient caching and the batch of several devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.models.encoder import Encoder, EncoderSettings
from mpjax.precision.casting import equations
from mpjax.training import (
    Layout,
    RunObjective,
    create_state,
    embedding,
    fingerprint,
    in_micro_batches,
    make_mesh,
    make_train_step,
    take_apart,
)


SETTINGS = EncoderSettings(
    vocabulary=40, length=6, positions=6, width=16, depth=2, heads=2, hidden=24, dropout=0.0, segments=1
)
TEMPERATURE = 0.1


def encoder(seed=0, **changes):
    return Encoder(dataclasses.replace(SETTINGS, **changes), rngs=nnx.Rngs(seed))


def batch_of(size, seed=0, *, negatives=True):
    drawn = np.random.default_rng(seed)
    names = [("tokens", "length"), ("positive", "positive_length"), ("negative", "negative_length")]
    batch = {}
    for tokens, length in names[: 3 if negatives else 2]:
        batch[length] = drawn.integers(2, 7, size).astype(np.int32)
        there = np.arange(6)[None] < batch[length][:, None]
        batch[tokens] = np.where(there, drawn.integers(1, 40, (size, 6)), 0).astype(np.int32)
    return {name: jnp.asarray(value) for name, value in batch.items()}


BATCH = batch_of(8)
LENGTHS = {"tokens": "length", "positive": "positive_length", "negative": "negative_length"}


def vectors(model, batch, name, length):
    return np.asarray(model(batch[name], batch[length]), np.float64)


def expected(model, batch, *, symmetric=False, wrong=()):
    """The losses in float64, without the candidates `wrong`, pairs of a row and a column."""
    queries, positives = (
        vectors(model, batch, *names) for names in (("tokens", "length"), ("positive", "positive_length"))
    )
    candidates = np.concatenate([positives, vectors(model, batch, "negative", "negative_length")])

    def losses(logits):
        return np.log(np.exp(logits).sum(axis=1)) - np.diagonal(logits)

    logits = queries @ candidates.T / TEMPERATURE
    for row, column in wrong:
        logits[row, column] = -np.inf
    if not symmetric:
        return losses(logits)
    return (losses(logits) + losses(positives @ queries.T / TEMPERATURE)) / 2


@nnx.jit(static_argnames=("symmetric", "count"))
def values_of(model, batch, *, symmetric=False, count=1):
    return embedding(temperature=TEMPERATURE, symmetric=symmetric, micro_batches=count)(model, batch, jax.random.key(0))


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_loss_is_the_cross_entropy_of_cosines_over_the_temperature(symmetric):
    model = encoder()
    values = values_of(model, BATCH, symmetric=symmetric)
    np.testing.assert_allclose(values["loss"], expected(model, BATCH, symmetric=symmetric), rtol=1e-5)


def test_ranks_count_candidates_that_are_as_near():
    model = encoder()
    same = {name: jnp.broadcast_to(value[:1], value.shape) for name, value in BATCH.items()}
    nearest = same | {"negative": BATCH["negative"], "negative_length": BATCH["negative_length"]}
    # Of equal pairs, each has its own positive and eight negatives as candidates.
    cosines = vectors(model, nearest, "tokens", "length")[:1] @ vectors(model, nearest, "negative", "negative_length").T
    own = vectors(model, nearest, "tokens", "length")[0] @ vectors(model, nearest, "positive", "positive_length")[0]
    rank = 1 + int((cosines > own).sum())
    values = values_of(model, nearest)
    np.testing.assert_allclose(values["mrr"], [1 / rank] * 8, rtol=1e-6)
    np.testing.assert_array_equal(values["accuracy"], [float(rank == 1)] * 8)
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    nnx.update(model, zeros)  # all vectors are the same
    assert float(jnp.max(values_of(model, BATCH)["mrr"])) == pytest.approx(1 / 16)
    assert float(jnp.max(values_of(model, BATCH)["accuracy"])) == 0


@pytest.mark.parametrize(
    ("copied", "wrong"),
    [
        ([("positive", 0, 1)], [(0, 1), (1, 0)]),
        ([("tokens", 0, 1)], [(0, 1), (1, 0)]),
        ([("negative", 2, 3, "positive")], [(2, 8 + 3)]),
        ([("negative", 2, 2, "tokens")], [(2, 8 + 2)]),
    ],
)
def test_texts_that_are_no_wrong_answers_are_no_negatives(copied, wrong):
    """Also the explicit negative of another row, where it is the answer."""
    model, batch = encoder(), dict(BATCH)
    for name, source, target, *of in copied:
        origin = of[0] if of else name
        for into, values in ((name, origin), (LENGTHS[name], LENGTHS[origin])):
            batch[into] = batch[into].at[target].set(batch[values][source])
    np.testing.assert_allclose(values_of(model, batch)["loss"], expected(model, batch, wrong=wrong), rtol=1e-5)


def test_padding_of_an_evaluation_is_no_candidate():
    model = encoder()
    objective = RunObjective(embedding(temperature=TEMPERATURE))
    padded = {name: value.at[6:].set(value[0]) for name, value in batch_of(8, seed=1).items()}
    whole = {name: value[:6] for name, value in padded.items()}
    weight = jnp.array([1.0] * 6 + [0.0] * 2)
    padded = {name: value.at[6:].set(batch_of(8, seed=2)[name][6:]) for name, value in padded.items()}
    measured = objective.measure(model, padded | {"weight": weight})
    for name, value in objective.measure(model, whole).items():
        np.testing.assert_allclose(measured[name][:6], value, rtol=1e-6)


def loss_and_gradients(model, batch, count):
    graph, params, others = nnx.split(model, nnx.Param, ...)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        merged = nnx.merge(graph, params, others, copy=True)
        values = embedding(temperature=TEMPERATURE, micro_batches=count)(merged, batch, jax.random.key(0))
        return jnp.mean(values["loss"])

    return loss(params)


def assert_same_gradients(actual, other):
    """Asserts that gradients differ by at most 3e-6 of the largest, as float32 sums are ordered."""
    largest = max(float(jnp.max(jnp.abs(array))) for array in jax.tree.leaves(other))
    for (path, a), (_, b) in zip(nnx.to_flat_state(actual), nnx.to_flat_state(other), strict=True):
        np.testing.assert_allclose(a[...], b[...], rtol=0, atol=3e-6 * largest, err_msg=str(path))


@pytest.mark.parametrize("count", [2, 4])
def test_cached_gradients_are_those_of_the_whole_batch(count):
    whole, parts = (loss_and_gradients(encoder(), BATCH, number) for number in (1, count))
    assert float(parts[0]) == pytest.approx(float(whole[0]), rel=1e-6)
    assert_same_gradients(parts[1], whole[1])


def test_cached_gradients_of_half_precision_weights_are_added_in_float32():
    """A sum of 512 equal terms in bfloat16 would stop at 256 of them."""

    class One(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((), jnp.bfloat16))

        def __call__(self, x):
            return x * self.weight[...]

    graph, params, _ = nnx.split(One(), nnx.Param, ...)

    def total(params):
        model = nnx.merge(graph, params, nnx.State({}))
        return jnp.sum(in_micro_batches(model, lambda model, x: model(x), jnp.ones(512, jnp.bfloat16), 512), dtype="f4")

    (gradient,) = jax.tree.leaves(jax.jit(jax.grad(total))(params))
    assert (float(gradient), gradient.dtype) == (512.0, jnp.bfloat16)


def test_each_micro_batch_has_a_dropout_of_its_own_and_the_same_twice():
    """Equal texts, so that all vectors would be equal without dropout."""
    model = encoder(dropout=0.5)
    same = {name: jnp.broadcast_to(value[:1], value.shape) for name, value in BATCH.items()}

    def spread(model, inputs):
        return in_micro_batches(model, lambda model, inputs: model(*inputs), inputs, 4)

    found = np.asarray(nnx.jit(spread)(model, (same["tokens"], same["length"])))
    assert len(np.unique(found.round(5), axis=0)) == 8


LAYOUTS = {
    "data": lambda: Layout(make_mesh()),
    "fsdp": lambda: Layout(
        make_mesh(data=1, fsdp=2),
        divided={"tokens/embedding": P("fsdp", None), "blocks/0/mlp/up/kernel": P(None, "fsdp")},
        blocks=("blocks/0", "blocks/1"),
    ),
}


def trained(layout, *, micro_batches=1, policy="float32", mode="module"):
    """The state after two steps on other batches, and their metrics."""
    model = encoder()
    if mode == "module":
        mpjax.apply_policy(model, policy)
    structure, params, stats = take_apart(model)
    tx = mpjax.static_loss_scaling(optax.sgd(0.1), 8.0)
    objective = RunObjective(embedding(temperature=TEMPERATURE, symmetric=True, micro_batches=micro_batches))
    options = {} if mode == "module" else {"cast": functools.partial(mpjax.autocast, policy=policy)}
    step = make_train_step(structure, tx, objective.loss_of, layout=layout, **options)
    state = create_state(params, stats, tx)
    if layout is not None:
        state = jax.device_put(state, layout.state(state))
    rows = []
    for seed in range(2):
        state, metrics = step(state, batch_of(8, seed))
        rows.append([float(metrics[name]) for name in ("loss", "accuracy", "mrr", "grad_norm")])
    return state, rows


@pytest.fixture(scope="module")
def alone():
    return trained(None)


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    [
        ("fsdp", 2),
        pytest.param("data", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        pytest.param("data", 2, marks=pytest.mark.slow),
    ],
)
def test_two_devices_contrast_the_texts_of_both(alone, kind, micro_batches):
    """Whether the batch is divided once more, into micro-batches, or not."""
    state, rows = trained(LAYOUTS[kind](), micro_batches=micro_batches)
    np.testing.assert_allclose(rows, alone[1], rtol=2e-6)
    for name, param in state.params.items():
        np.testing.assert_allclose(param, alone[0].params[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        ("mixed_float16", "module"),
        ("O1", "autocast"),
        pytest.param("mixed_bfloat16", "module", marks=pytest.mark.slow),
        pytest.param("bfloat16", "module", marks=pytest.mark.slow),
    ],
)
def test_half_precision_trains_near_float32(alone, policy, mode):
    _, rows = trained(None, micro_batches=2, policy=policy, mode=mode)
    assert rows != alone[1]
    np.testing.assert_allclose(rows, alone[1], rtol=0.05)


def test_autocast_leaves_cosines_and_the_temperature_in_float32():
    """In float16, a cosine of 0.5 over a temperature of 0.1 would be off by 0.005."""
    model = encoder()
    program = jax.make_jaxpr(
        mpjax.autocast(lambda model: embedding(temperature=TEMPERATURE)(model, BATCH, None)["loss"], policy="O1")
    )(model)
    products = [
        eqn.invars[0].aval.dtype
        for _, eqn in equations(program.jaxpr)
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == (8, 16)
    ]
    assert products == [jnp.float32]


def test_fingerprints_tell_texts_apart():
    tokens = jnp.asarray([[1, 2, 3], [2, 1, 3], [1, 2, 3], [1, 2, 0]])
    marks = np.asarray(fingerprint(tokens))
    assert (marks[0] == marks[2]).all()
    assert all((marks[0] != marks[other]).all() for other in (1, 3))
