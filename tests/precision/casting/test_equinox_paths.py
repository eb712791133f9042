"""Equinox modules among the arguments run under scopes of their paths, so that rules and a diagnosis can name them."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.diagnosis import diagnose_function
from mpjax.errors import UsageError
from mpjax.precision.casting import equations, equinox_scopes


KEYS = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(jax.random.key(1), (4, 8))


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = (eqx.nn.Linear(8, 8, key=each) for each in jax.random.split(key))

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class Net(eqx.Module):
    """Blocks in a list, layers in a container that is called, and a holder that is not."""

    blocks: list
    heads: dict
    seq: eqx.nn.Sequential

    def __init__(self):
        self.blocks = [Block(KEYS[0]), Block(KEYS[1])]
        self.heads = {"main": eqx.nn.Linear(8, 8, key=KEYS[2])}
        relu = eqx.nn.Lambda(jax.nn.relu)
        self.seq = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=KEYS[3]), relu, eqx.nn.Linear(8, 4, key=KEYS[4])])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.seq(self.heads["main"](x))


class Caller(eqx.Module):
    """A module that calls another, which it does not contain."""

    own: eqx.nn.Linear
    bias: jax.Array

    def __call__(self, other, x):
        """Another's layer, then its own."""
        return self.own(other(x)) + self.bias


def loss_fn(net, x):
    return jnp.mean(jnp.square(jax.vmap(net)(x).astype(jnp.float32)))


def products(policy):
    net = Net()
    jaxpr = jax.make_jaxpr(lambda x: mpjax.autocast(loss_fn, policy)(net, x))(X)
    return {path: eqn.outvars[0].aval.dtype for path, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"}


def test_a_scope_is_the_path_of_the_module():
    assert [path.removesuffix("/eqx.nn.Linear") for path in products("mixed_float16")] == [
        *("blocks/0/up", "blocks/0/down", "blocks/1/up", "blocks/1/down", "heads/main", "seq/layers/0", "seq/layers/2")
    ]


@pytest.mark.parametrize(
    ("rule", "kept"), [("blocks/1", 2), ("blocks/0/up", 1), ("seq", 2), ("eqx.nn.Linear", 7), ("blocks/*/up", 2)]
)
def test_a_rule_is_for_a_path_or_for_a_class(rule, kept):
    dtypes = list(products(f"mixed_float16;{rule}=float32").values())
    assert (dtypes.count(jnp.float32), dtypes.count(jnp.float16)) == (kept, 7 - kept)


def test_a_rule_for_no_path_names_the_nearest():
    with pytest.raises(UsageError, match="rule 'blocks/2' matches nothing; nearest: blocks/"):
        products("mixed_float16;blocks/2=float32")


def test_the_caller_s_modules_are_left_as_they_are():
    net = Net()
    before = jax.tree.structure(net)
    result = mpjax.autocast(loss_fn, "float32;blocks/0=float16")(net, X)
    assert (jax.tree.structure(net)) == before
    assert result == pytest.approx(float(loss_fn(net, X)), rel=1e-2)
    alone = jax.make_jaxpr(net.heads["main"])(X[0])
    assert {path for path, _ in equations(alone)} == {"eqx.nn.Linear"}


def test_a_model_that_is_put_together_in_the_function_has_its_paths_too():
    params, static = eqx.partition(Net(), eqx.is_array)
    fn = mpjax.autocast(lambda params, x: loss_fn(eqx.combine(params, static), x), "mixed_float16;blocks/1=float32")
    jaxpr = jax.make_jaxpr(fn)(params, X)
    paths = [path for path, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert paths[2] == "blocks/1/up/eqx.nn.Linear"


def test_modules_that_share_a_function_have_paths_of_their_own():
    class Two(eqx.Module):
        first: eqx.nn.MLP
        second: eqx.nn.MLP

        def __call__(self, x):
            return self.second(self.first(x))

    net = Two(*(eqx.nn.MLP(8, 8, 4, 1, activation=jax.nn.relu, key=key) for key in KEYS[:2]))
    jaxpr = jax.make_jaxpr(lambda x: mpjax.autocast(lambda net, x: net(x), "mixed_float16")(net, x))(X[0])
    paths = [path for path, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    inner = "layers/0/eqx.nn.Linear", "layers/1/eqx.nn.Linear"
    assert paths == [f"{outer}/{layer}" for outer in ("first", "second") for layer in inner]


def test_a_module_that_another_only_calls_has_its_path_under_the_caller_s():
    class Two(eqx.Module):
        first: eqx.nn.Linear
        second: Caller

        def __call__(self, x):
            return self.second(self.first, x)

    net = Two(eqx.nn.Linear(8, 8, key=KEYS[0]), Caller(eqx.nn.Linear(8, 8, key=KEYS[1]), X[0]))
    jaxpr = jax.make_jaxpr(lambda x: mpjax.autocast(lambda net, x: net(x), "mixed_float16")(net, x))(X[0])
    paths = [path for path, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert paths == ["second/first/eqx.nn.Linear", "second/own/eqx.nn.Linear"]


def test_a_call_keeps_its_signature_and_its_docstring():
    caller = Caller(eqx.nn.Linear(8, 8, key=KEYS[0]), X[0])
    with equinox_scopes(caller):
        pass
    assert str(inspect.signature(caller)) == "(other, x)"
    assert Caller.__call__.__doc__ == "Another's layer, then its own."


RULES = {"blocks/1/up": "float32", "blocks/1/down": "float32"}


def test_a_diagnosis_names_one_layer_and_not_all_of_its_class():
    net = Net()
    net = eqx.tree_at(lambda n: n.blocks[1].up.weight, net, net.blocks[1].up.weight * 1e6)
    net = eqx.tree_at(lambda n: n.blocks[1].down.weight, net, net.blocks[1].down.weight * 1e-6)
    found = diagnose_function(loss_fn, net, X)
    assert (found.verdict, found.path, found.rules) == ("overflow", "blocks/1/up", RULES)
    assert found.verified
    assert jnp.isfinite(mpjax.autocast(loss_fn, found.repaired_policy)(net, X))


def test_a_module_that_only_calls_others_is_not_needed_to_name_them():
    class Two(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear

        def __call__(self, x):
            return self.second(jax.nn.relu(self.first(x)))

    two = Two(*(eqx.nn.Linear(8, 8, key=key) for key in KEYS[:2]))
    two = eqx.tree_at(lambda two: two.first.weight, two, two.first.weight * 1e6)
    found = diagnose_function(lambda two, x: jnp.mean(jnp.tanh(jax.vmap(two)(x) * 1e-6)), two, X)
    assert (found.path, found.rules) == ("first", {"first": "float32", "second": "float32"})
