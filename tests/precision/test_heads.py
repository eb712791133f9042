"""The layer that produces a model's output multiplies in half precision, and its sums leave in float32."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.precision import apply_policy


X = jnp.abs(jax.random.normal(jax.random.key(0), (4, 8)))


def linear(rngs, size=8):
    return nnx.Linear(8, size, rngs=rngs)


class Named(nnx.Module):
    """A model with attributes of these names, called one after the other."""

    def __init__(self, rngs, **layers):
        self.order = tuple(layers)
        for name, make in layers.items():
            setattr(self, name, make(rngs))

    def __call__(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(16, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, tokens):
        return self.tokens.attend(self.norm(self.tokens(tokens)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.out = linear(rngs), linear(rngs)

    def __call__(self, x):
        return x + self.out(nnx.relu(self.up(x)))


def sequential(*makes):
    return lambda rngs: nnx.Sequential(*[make(rngs) if make in (linear, Block) else make for make in makes])


def blocks(rngs):
    return nnx.Sequential(Block(rngs), Block(rngs))


def general(rngs):
    return nnx.LinearGeneral(8, (2, 2), rngs=rngs)


def norm(rngs):
    return nnx.LayerNorm(8, rngs=rngs)


def dropout(rngs):
    return nnx.Dropout(0.5, rngs=rngs)


def convolution(rngs):
    return nnx.Conv(8, 8, (1,), rngs=rngs)


def two(rngs):
    return Named(rngs, up=linear, down=linear)


def listed(rngs):
    return nnx.List([linear(rngs), linear(rngs)])


class Uncalled(nnx.Module):
    """A model whose methods have other names."""

    def __init__(self, rngs):
        self.hidden, self.project = linear(rngs), linear(rngs)


def attention(rngs):
    return nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)


MODELS = {
    "a layer": (linear, [""]),
    "the last of a list": (sequential(linear, nnx.relu, linear), ["layers/2"]),
    "numbered": (lambda rngs: Named(rngs, fc1=linear, fc2=linear, fc3=linear), ["fc3"]),
    "named": (lambda rngs: Named(rngs, stem=linear, classifier=linear), ["classifier"]),
    "named otherwise": (lambda rngs: Named(rngs, inputs=linear, output_layer=linear), ["output_layer"]),
    "in a model": (lambda rngs: Named(rngs, net=lambda r: Named(r, a=linear, lm_head=linear)), ["net/lm_head"]),
    "the only linear one": (lambda rngs: Named(rngs, body=blocks, dense=linear), ["dense"]),
    "a head with layers": (lambda rngs: Named(rngs, a=linear, head=sequential(linear, linear)), ["head/layers/1"]),
    "blocks alone": (blocks, []),
    "the last of two": (lambda rngs: Named(rngs, hidden=linear, project=linear), ["project"]),
    "the last of three, which is the first by name": (lambda r: Named(r, z=linear, y=linear, x=linear), ["x"]),
    "the last one, of other sizes": (lambda r: Named(r, hidden=linear, decode=general), ["decode"]),
    "the last before a norm": (lambda r: Named(r, hidden=linear, b=linear, a=norm, drop=dropout), ["b"]),
    "the last of the last list": (lambda r: Named(r, stem=linear, body=listed), ["body/1"]),
    "the last one holds others": (lambda r: Named(r, embed=linear, project=linear, block=two), []),
    "the last one attends": (lambda r: Named(r, encode=linear, project=linear, decode=attention), []),
    "the last one is a convolution": (lambda r: Named(r, a=linear, b=linear, c=convolution), []),
    "called as blocks in a loop are": (lambda r: Named(r, hidden=linear, all=linear), ["all"]),
    "two of a model that cannot be called": (Uncalled, []),
    "attention": (attention, []),
    "a cell": (lambda rngs: nnx.SimpleCell(8, 8, rngs=rngs), []),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_found_by_name_and_form_also_in_a_model_that_was_merged(name):
    make, heads = MODELS[name]
    model = make(nnx.Rngs(0))
    for each in (model, nnx.merge(*nnx.split(model)), nnx.eval_shape(lambda: make(nnx.Rngs(0)))):
        assert [row.path for row in apply_policy(each, "mixed_bfloat16") if row.rule == "type:head"] == heads


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", ["linear", "general", "conv"])
def test_a_head_is_the_product_of_half_precision_operands_in_float32(kind, policy):
    make = {
        "linear": lambda: nnx.Linear(8, 3, rngs=nnx.Rngs(0)),
        "general": lambda: nnx.LinearGeneral(8, 3, rngs=nnx.Rngs(0)),
        "conv": lambda: nnx.Conv(8, 3, (1,), rngs=nnx.Rngs(0)),
    }[kind]
    model, plain = make(), make()
    x = X[None] if kind == "conv" else X
    apply_policy(model, policy)
    half = model.dtype
    for module in (model, plain):
        module.bias.set_value(jnp.full(3, 1.001))
    for variable in (plain.kernel, plain.bias):
        variable.set_value(variable[...].astype(half).astype(jnp.float32))
    y = model(x)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, plain(x.astype(half).astype(jnp.float32)), rtol=1e-6)
    assert bool(jnp.any(y != y.astype(half).astype(jnp.float32)))


def test_a_gradient_through_a_head_is_that_of_a_product_in_half_precision():
    def gradient(policy):
        model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        apply_policy(model, policy)
        graph, state = nnx.split(model)
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x).astype(jnp.float32))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(state, X), jax.make_jaxpr(jax.grad(loss))(state, X)

    (wide, jaxpr), (half, _) = gradient("mixed_bfloat16"), gradient("p=f32,c=bf16,o=bf16")
    jax.tree.map(np.testing.assert_array_equal, wide, half)
    assert "f32[8,3] = dot_general" not in str(jaxpr)
    assert "bf16" in str(jaxpr)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_tied_logits_leave_in_float32_also_after_another_life(policy):
    model = Tied(nnx.Rngs(0))
    apply_policy(model, policy)
    for each in (model, nnx.merge(*nnx.split(model)), nnx.clone(model), pickle.loads(pickle.dumps(model))):
        logits = each(jnp.arange(4))
        assert logits.dtype == jnp.float32
        assert bool(jnp.any(logits != logits.astype(each.tokens.dtype).astype(jnp.float32)))
    assert model.tokens(jnp.arange(4)).dtype == model.tokens.dtype


@pytest.mark.parametrize(
    ("policy", "wide"),
    [
        ("mixed_bfloat16", True),
        ("mixed_bfloat16;layers/1=bfloat16", False),
        ("p=f32,c=bf16,o=bf16", False),
        ("p=f32,c=bf16,o=bf16;layers/1=p=f32,c=bf16,o=f32", True),
        ("mixed_float8", True),
        ("bfloat16", True),
        ("O3", False),
        ("float32", True),
    ],
)
def test_a_rule_of_the_users_decides_and_a_later_policy_takes_it_back(policy, wide):
    model = nnx.Sequential(linear(nnx.Rngs(0)), linear(nnx.Rngs(1)), nnx.relu)
    if policy == "mixed_float8":
        model = nnx.Sequential(*[nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(3)])
    other = nnx.clone(model)
    apply_policy(model, "mixed_float16")
    apply_policy(model, policy)
    apply_policy(other, policy)
    assert nnx.graphdef(model) == nnx.graphdef(other)
    layer = model.layers[2 if policy == "mixed_float8" else 1]
    assert (layer(jnp.ones((1, layer.in_features), layer.dtype)).dtype == jnp.float32) == wide
    if policy == "float32":
        assert layer.dot_general is jax.lax.dot_general


def test_layers_that_a_loop_takes_one_by_one_are_no_heads():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stacked(rngs):
        return linear(rngs)

    class Loop(nnx.Module):
        def __init__(self, rngs):
            self.out = stacked(rngs)

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.out)

    model = Loop(nnx.Rngs(0))
    assert "type:head" not in {row.rule for row in apply_policy(model, "mixed_bfloat16")}
    assert model(X.astype(jnp.bfloat16)).dtype == jnp.float32
