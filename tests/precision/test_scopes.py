"""Named scopes: operations carry the path of their module, and nothing else of the model changes."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.precision import apply_policy, name_scopes
from mpjax.precision.casting import equations


class Block(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.conv1(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    return Net(nnx.Rngs(0))


def scopes(model):
    """The scope of each operation of interest, in order."""
    graph, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, jnp.ones((1, 2), jnp.float32)).jaxpr
    wanted = ("dot_general", "tanh")
    return [(eqn.primitive.name, scope) for scope, eqn in equations(jaxpr) if eqn.primitive.name in wanted]


NAMED = [
    ("dot_general", "blocks/0/conv1"),
    ("tanh", "blocks/0"),
    ("dot_general", "blocks/1/conv1"),
    ("tanh", "blocks/1"),
    ("dot_general", "head"),
]


def test_every_operation_is_under_the_path_of_its_module():
    model = net()
    assert {scope for _, scope in scopes(model)} == {""}
    name_scopes(model)
    assert scopes(model) == NAMED


@pytest.mark.parametrize("order", ["scopes first", "policy first"])
def test_scopes_and_a_policy_go_together(order):
    model = net()
    steps = [lambda: name_scopes(model), lambda: apply_policy(model, "p=f32,c=f16,o=bf16")]
    for step in steps if order == "scopes first" else reversed(steps):
        step()
    assert scopes(model) == NAMED
    assert model(jnp.ones((1, 2), jnp.float32)).dtype == jnp.bfloat16


def test_scopes_survive_a_second_policy():
    model = net()
    name_scopes(model)
    apply_policy(model, "p=f32,c=f16,o=bf16;blocks/0=p=f32,c=f16,o=f16")
    apply_policy(model, "mixed_float16")
    assert scopes(model) == NAMED


def test_names_classes_and_graph_definitions_are_kept():
    first, second = net(), net()
    name_scopes(first)
    name_scopes(second)
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert isinstance(first.head, nnx.Linear)
    assert (type(first.head).__name__, type(first.head).__module__) == ("Linear", nnx.Linear.__module__)
    assert type(first) is Net  # the root needs no name


def test_the_program_is_the_same_but_for_its_names():
    plain, named = net(), net()
    name_scopes(named)
    x = jnp.ones((1, 2), jnp.float32)
    assert str(jax.make_jaxpr(named)(x)) == str(jax.make_jaxpr(plain)(x))
