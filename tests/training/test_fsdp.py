"""Parameters gathered where they are used: how often, in which dtype, and never half a parameter for a whole."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mpjax.errors import UsageError
from mpjax.models import apply_remat
from mpjax.precision import apply_policy, no_loss_scaling
from mpjax.precision.casting import bodies
from mpjax.training import Layout, create_state, make_mesh, make_train_step, take_apart


class Stack(nnx.Module):
    """An embedding, three blocks and the embedding again."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.embed.attend(x)


class TiedInAList(Stack):
    """Uses the embedding, an item of a list here, by another method than its call."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.blocks = nnx.List([self.embed, *self.blocks])
        del self.embed

    def __call__(self, tokens):
        embed, *blocks = self.blocks
        x = embed(tokens)
        for block in blocks:
            x = jnp.tanh(block(x))
        return embed.attend(x)


class Reads(Stack):
    """Reads a parameter of a block outside of the block's call."""

    def __call__(self, tokens):
        return super().__call__(tokens) + jnp.sum(self.blocks[0].kernel[...])


MESH = make_mesh(data=1, fsdp=2)
KERNELS = [f"blocks/{i}/kernel" for i in range(3)]
BLOCKS = tuple(f"blocks/{i}" for i in range(3))
TOKENS = {"tokens": jnp.asarray([[0, 1], [2, 3], [4, 5], [0, 0]])}


def loss(model, batch, key):
    return jnp.mean(jnp.square(model(batch["tokens"]).astype(jnp.float32))), {}


def layout_of(*, half=(), blocks=BLOCKS, **more):
    divided = {"embed/embedding": P("fsdp", None), **dict.fromkeys(KERNELS, P(None, "fsdp")), **more}
    dtypes = dict.fromkeys(half, jnp.dtype("bfloat16"))
    return Layout(MESH, divided=divided, blocks=blocks, travels=dtypes, given=dtypes)


def step_of(layout, *, model=Stack, policy="mixed_bfloat16", remat="none"):
    model = model(rngs=nnx.Rngs(0))
    apply_policy(model, policy)
    apply_remat(model, remat)
    structure, params, stats = take_apart(model)
    tx = no_loss_scaling(optax.sgd(0.5))
    return make_train_step(structure, tx, loss, layout=layout), create_state(params, stats, tx)


def gathers(layout, **settings):
    """How often what is gathered, by shape and dtype of the whole."""
    step, state = step_of(layout, **settings)
    jaxprs = bodies(jax.make_jaxpr(step)(state, TOKENS).jaxpr)
    found = [eqn for body in jaxprs for eqn in body.eqns if eqn.primitive.name.startswith("all_gather")]
    return collections.Counter((eqn.outvars[0].aval.shape, f"{eqn.outvars[0].aval.dtype}") for eqn in found)


@pytest.mark.parametrize("remat", ["none", pytest.param("dots", marks=pytest.mark.slow), "full"])
def test_blocks_gather_in_the_backward_pass_again(remat):
    assert gathers(layout_of(), policy="float32", remat=remat) == {((6, 4), "float32"): 1, ((4, 4), "float32"): 6}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_travels_in_half_precision_is_gathered_in_it(remat):
    assert gathers(layout_of(half=KERNELS), remat=remat) == {((6, 4), "float32"): 1, ((4, 4), "bfloat16"): 6}


def test_without_blocks_all_is_gathered_once_and_kept():
    assert gathers(layout_of(blocks=())) == {((6, 4), "float32"): 1, ((4, 4), "float32"): 3}


@pytest.mark.parametrize(
    ("policy", "remat"), [pytest.param("float32", "none", marks=pytest.mark.slow), ("mixed_bfloat16", "full")]
)
def test_half_precision_travel_changes_no_bit(policy, remat):
    """Of parameters that layers cast to it in any case; in float32 nothing is to travel so.

    Biases are left out: a CPU rounds their sums in bfloat16 or not, by what else it computes in one loop with them.
    """
    half = KERNELS if policy == "mixed_bfloat16" else ()
    results = []
    for layout in (layout_of(), layout_of(half=half, blocks=()), layout_of(half=half)):
        step, state = step_of(layout, policy=policy, remat=remat)
        state, metrics = step(state, TOKENS)
        results.append([np.asarray(x).tobytes() for x in (metrics["loss"], *(state.params[name] for name in KERNELS))])
    assert results[0] == results[1] == results[2]


class Wide(nnx.Module):
    """Four layers, of which mixed_float8 has the inner two in float8."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])
        self.blocks[1].kernel[...] *= 1e3  # scales of layers differ

    def __call__(self, tokens):
        x = jnp.repeat(jnp.sin(tokens.astype(jnp.float32)), 32, axis=-1)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(None, "fsdp"), P("fsdp", None)])
def test_float8_travel_halves_the_bytes_and_changes_no_bit(spec):
    kernels = [f"blocks/{i}/kernel" for i in range(4)]
    inner = dict.fromkeys(kernels[1:3], jnp.dtype("float8_e4m3fn"))
    half = dict.fromkeys(kernels, jnp.dtype("bfloat16"))
    layouts = [
        Layout(MESH, divided=dict.fromkeys(kernels, spec), blocks=BLOCKS, travels=half | more, given=half)
        for more in ({}, inner)
    ]
    results = []
    for layout in layouts:
        step, state = step_of(layout, model=Wide, policy="mixed_float8")
        state, metrics = step(state, TOKENS)
        results.append([np.asarray(x).tobytes() for x in (metrics["loss"], *(state.params[name] for name in kernels))])
    assert results[0] == results[1]
    found = gathers(layouts[1], model=Wide, policy="mixed_float8")
    assert found == {((64, 64), "float8_e4m3fn"): 4, ((64, 64), "bfloat16"): 2}


def test_a_step_on_parts_is_that_on_one_device():
    states = []
    for layout in (None, layout_of()):
        step, state = step_of(layout, policy="float32")
        for _ in range(2):
            state, _ = step(state, TOKENS)
        states.append(state.params)
    for name, param in states[0].items():
        np.testing.assert_allclose(param, states[1][name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert [shard.data.shape for shard in states[1]["embed/embedding"].addressable_shards] == [(3, 4)] * 2


@pytest.mark.parametrize(("model", "name"), [(Reads, "blocks/0/kernel"), (TiedInAList, "blocks/0/embedding")])
def test_a_part_used_outside_of_its_blocks_call_is_an_error(model, name):
    """Silently, half an embedding would give the logits of half of the vocabulary."""
    layout = layout_of(**{"blocks/0/embedding": P("fsdp", None), "blocks/3/kernel": P(None, "fsdp")})
    step, state = step_of(layout, model=model)
    with pytest.raises(UsageError, match=f"^{name} is divided over fsdp, and gathered only while blocks/0 or"):
        step(state, TOKENS)


def test_a_parameter_that_blocks_share_is_an_error_or_whole():
    """Its name is that of the first block; gathered there, it is not in the others."""

    class Tied(Stack):
        def __init__(self, *, rngs: nnx.Rngs):
            super().__init__(rngs=rngs)
            self.blocks[1].kernel = self.blocks[0].kernel

    step, state = step_of(layout_of(), model=Tied)
    with pytest.raises(UsageError, match="^blocks/0/kernel is divided over fsdp"):
        step(state, TOKENS)
