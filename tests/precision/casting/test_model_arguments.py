"""Flax NNX modules as arguments of traced functions: seen through, and brought up to date."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.casting import autocast, full_precision, take_models_apart


class Net(nnx.Module):
    """A linear layer, batch norm, dropout, and a counter of calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


INPUT = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)


def total(model, x):
    return jnp.sum(model(x))


def state_of(model) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngKey)))
    return {"/".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in flat}


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.value_and_grad], ids=["eager", "jit", "grad"])
def test_what_a_call_changes_in_a_model_is_changed(wrap):
    model, control = Net(), Net()
    wrap(autocast(total, "mixed_float16"))(model, INPUT)
    wrap(total)(control, INPUT)
    after, wanted = state_of(model), state_of(control)
    assert after["calls"] == 1
    assert after["dropout/rngs/count"] == wanted["dropout/rngs/count"] == 1
    assert after["norm/mean"].dtype == np.float32
    np.testing.assert_allclose(after["norm/mean"], wanted["norm/mean"], rtol=2e-3)
    np.testing.assert_allclose(after["norm/var"], wanted["norm/var"], rtol=2e-3)
    np.testing.assert_array_equal(after["linear/kernel"], wanted["linear/kernel"])


def test_statistics_are_those_of_the_half_precision_product():
    model = Net()
    autocast(total, "mixed_bfloat16")(model, INPUT)
    half = (INPUT.astype(jnp.bfloat16) @ model.linear.kernel[...].astype(jnp.bfloat16)).astype(jnp.float32)
    np.testing.assert_array_equal(model.norm.mean[...], np.float32(0.01) * jnp.sum(half, axis=0) / np.float32(3))


def test_an_array_that_a_module_replaces_is_an_array_after_the_call():
    class Last(nnx.Module):
        def __init__(self):
            self.total = nnx.data(jnp.zeros(()))

        def __call__(self, x):
            self.total = jnp.sum(x)
            return x

    model = Last()
    autocast(lambda model, x: model(x), "mixed_float16")(model, INPUT)
    assert not isinstance(model.total, jax.core.Tracer)
    assert model.total == 66.0


@pytest.mark.parametrize("around", [lambda f: autocast(f, "mixed_float16"), full_precision])
def test_a_module_may_be_the_function(around):
    model = Net()
    around(model)(INPUT)
    assert model.calls[...] == 1


def test_a_full_precision_region_inside_changes_the_model_too():
    model = Net()

    def forward(model, x):
        return full_precision(model.norm)(model.linear(x))

    assert autocast(forward, "mixed_float16")(model, INPUT).dtype == jnp.float32
    assert jnp.all(model.norm.var[...] != 1)


def test_the_scopes_of_a_model_are_its_paths():
    from mpjax.precision import Policy

    policy = Policy("float32", "float16", "float32", rules={"linear": "float32"})
    program = str(jax.make_jaxpr(lambda x: autocast(lambda m, x: m.linear(x), policy)(Net(), x))(INPUT))
    assert "f16" not in program


def test_what_two_arguments_share_is_shared_inside():
    model = Net()

    def twice(models, x):
        return models["first"](x) + models["second"](x)

    autocast(twice, "mixed_float16")({"first": model, "second": model}, INPUT)
    assert model.calls[...] == 2


def test_an_exception_leaves_the_model_as_it_was():
    model = Net()
    before = state_of(model)

    def fails(model, x):
        model(x)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        autocast(fails, "mixed_float16")(model, INPUT)
    jax.tree.map(np.testing.assert_array_equal, before, state_of(model))


def test_random_streams_and_keyword_arguments():
    rngs = nnx.Rngs(dropout=3)

    def draw(x, *, rngs):
        return x * jax.random.uniform(rngs.dropout(), x.shape)

    first = autocast(draw, "mixed_float16")(INPUT, rngs=rngs)
    second = autocast(draw, "mixed_float16")(INPUT, rngs=rngs)
    assert rngs.dropout.count[...] == 2
    assert jnp.any(first != second)


def test_without_models_nothing_is_added():
    arguments = ({"w": INPUT}, 1.0)
    apart = take_models_apart(arguments)
    assert apart.tree == (None, arguments)
    joined, changed = apart.join(apart.tree)
    assert joined is arguments
    assert changed() is None


def test_a_rule_for_a_module_that_this_call_does_not_run_is_no_error():
    model = Net()
    model.eval()
    autocast(total, "mixed_float16;dropout=float32")(model, INPUT)
    with pytest.raises(UsageError, match="rule 'dropuot' matches nothing; nearest: dropout"):
        autocast(total, "mixed_float16;dropuot=float32")(model, INPUT)
