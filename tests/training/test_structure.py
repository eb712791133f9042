"""A model taken apart and put together again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.training import take_apart


class Mixed(nnx.Module):
    """A list, batch statistics, two random streams and a constant."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.noise(self.dropout(self.norm(x)))


@pytest.fixture(scope="module")
def model():
    return Mixed(nnx.Rngs(0))


def test_arrays_are_named_by_path_and_sorted_into_kinds(model):
    _, params, stats = take_apart(model)
    assert set(stats) == {"norm/mean", "norm/var"}
    assert set(params) == {"norm/scale", "norm/bias"} | {
        f"layers/{i}/{n}" for i in range(11) for n in ("kernel", "bias")
    }
    np.testing.assert_array_equal(params["layers/10/kernel"], model.layers[10].kernel[...])


def test_together_again_it_is_the_same_model(model):
    structure, params, stats = take_apart(model)
    whole = structure.assemble(params, stats)
    assert type(whole) is type(model)
    for (path, one), (other_path, other) in zip(
        nnx.to_flat_state(nnx.state(model, nnx.Param)), nnx.to_flat_state(nnx.state(whole, nnx.Param)), strict=True
    ):
        assert path == other_path
        np.testing.assert_array_equal(one[...], other[...])
    x = jnp.ones((3, 2))
    model.eval()
    whole.eval()
    np.testing.assert_array_equal(model(x), whole(x))


def test_an_abstract_model_gives_the_same_structure(model):
    abstract = nnx.eval_shape(lambda: Mixed(nnx.Rngs(0)))
    structure, params, _ = take_apart(model)
    other, shapes, _ = take_apart(abstract)
    assert structure.params.names == other.params.names
    assert {name: shape.shape for name, shape in shapes.items()} == {name: p.shape for name, p in params.items()}
    assert isinstance(other.assemble(params, take_apart(model)[2]), Mixed)


def test_statistics_are_those_after_the_call(model):
    structure, params, stats = take_apart(model)
    whole = structure.assemble(params, stats)
    whole.train()
    whole(jnp.ones((3, 2)))
    assert set(structure.stats_of(whole)) == set(stats)
    assert not np.array_equal(structure.stats_of(whole)["norm/mean"], stats["norm/mean"])


def streams(structure, params, stats, key):
    whole = structure.assemble(params, stats, key)
    found = nnx.to_flat_state(nnx.state(whole, nnx.RngKey))
    return [np.asarray(jax.random.key_data(variable.get_value())).tobytes() for _, variable in found]


def test_random_streams_follow_the_key_and_differ_from_each_other_and_from_what_a_loss_draws(model):
    """A loss that splits or folds the same key gets other numbers: split(key)[i] is fold_in(key, i)."""
    structure, params, stats = take_apart(model)
    key = jax.random.key(5)
    one, again = (streams(structure, params, stats, key) for _ in range(2))
    other = streams(structure, params, stats, jax.random.key(6))
    drawn = [np.asarray(jax.random.key_data(k)).tobytes() for k in jax.random.split(key, 10)]
    assert one == again
    assert len({*one, *other}) == len(one) + len(other)
    assert len(one) > 1
    assert not {*one} & {*drawn}


def test_dropout_trains_differs_between_steps_and_is_off_in_evaluation(trainer, batch):
    def output(model, batch, key):
        logits = model(batch["image"])
        return jnp.mean(logits[:, 0]), {"out": jnp.sum(jnp.abs(logits))}

    made = trainer(optax.sgd(0.0), net={"norm": False, "dropout": 0.5}, loss=output)
    data = batch(1, size=32)
    evaluated = [made.evaluate(data)]
    _, metrics = made.run([data, data, data])
    evaluated += [made.evaluate(data), made.evaluate(data)]
    assert len({float(m["out"]) for m in metrics}) == 3
    assert len(set(evaluated)) == 1


def test_dropout_trains_parameters_and_repeats_exactly(trainer, batch):
    one, other = (trainer(net={"dropout": 0.5}).run([batch(i) for i in range(3)])[0] for _ in range(2))
    for name, value in one[-1].params.items():
        assert value.tobytes() == other[-1].params[name].tobytes()
        assert value.tobytes() != one[0].params[name].tobytes()
