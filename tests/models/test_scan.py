"""Blocks as one loop over stacked arrays compute what they compute one by one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import (
    BERT,
    GPT2,
    LayerKind,
    Rope,
    Stack,
    ViT,
    add_lora,
    apart,
    apply_remat,
    in_series,
    one_by_one,
    require_alike,
    stacks_of,
)
from mpjax.models.decoder import Decoder, DecoderSettings
from mpjax.models.diffusion import DiT
from mpjax.precision import apply_policy, name_scopes
from mpjax.precision.casting import equations
from mpjax.training import named, take_apart


TOKENS = jnp.arange(12).reshape(2, 6) % 11
IMAGES = jnp.linspace(-1, 1, 2 * 4 * 4 * 3).reshape(2, 4, 4, 3)


def dit(*, dropout, **settings):
    """Without the zeros of its first values, with which no block has an effect."""
    assert dropout == 0
    made = DiT(image_shape=(4, 4, 3), num_classes=3, **settings)
    made.head.kernel[...] += 0.1
    for block in [made, *made.blocks] if isinstance(made.blocks, nnx.List) else [made, made.blocks.all]:
        block.modulation.kernel[...] += 0.05
    return made


MODELS = {
    "gpt2": (functools.partial(GPT2, vocabulary=11, length=6), (TOKENS,)),
    "vit": (functools.partial(ViT, image_shape=(4, 4, 3), num_classes=3, patch=2, pool="cls"), (IMAGES,)),
    "dit": (dit, (IMAGES, jnp.array([0, 999]), jnp.array([1, 3]))),
    "bert": (functools.partial(BERT, vocabulary=11, length=6, num_classes=3), (TOKENS, jnp.array([6, 4]))),
}


def build(scan, name="gpt2", *, policy="float32", dropout=0.0, depth=3, remat="none", seed=0):
    make, _ = MODELS[name]
    made = make(width=8, depth=depth, heads=2, dropout=dropout, scan_blocks=scan, rngs=nnx.Rngs(seed))
    name_scopes(made)
    apply_policy(made, policy)
    apply_remat(made, remat)
    return made


def loss_and_gradients(made, inputs=(TOKENS,)):
    """The loss, the gradients of single blocks by path, and what the call left in the rest of the model."""
    structure, params, _ = take_apart(made)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        made = structure.assemble(params, {}, jax.random.key(7))
        total = jnp.mean(jnp.square(made(*inputs).astype(jnp.float32)))
        return total, named(nnx.state(made, nnx.RngCount))

    (value, counts), grads = loss(params)
    return float(value), apart(grads, stacks_of(made)), apart(counts, stacks_of(made))


def assert_close(grads, others, *, relative):
    """Every array differs by less than this share of its largest value."""
    assert grads.keys() == others.keys()
    for name, one in grads.items():
        np.testing.assert_allclose(others[name], one, rtol=0, atol=relative * float(jnp.max(jnp.abs(one))) + 1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.slow), "vit", pytest.param("bert", marks=pytest.mark.slow)]
)
def test_initial_values_are_those_of_single_blocks_bit_for_bit(name):
    single, stacked = (build(scan, name) for scan in (False, True))
    assert stacks_of(stacked) == {"blocks": 3}
    assert not stacks_of(single)
    values, rows = named(nnx.state(single, nnx.Param)), named(nnx.state(stacked, nnx.Param))
    assert rows["blocks/all/attention/query/kernel"].shape == (3, 8, 2, 4)
    rows = apart(rows, stacks_of(stacked))
    assert rows.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(rows[path], value, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_single_blocks_to_float32_rounding(name):
    inputs = MODELS[name][1]
    value, grads, _ = loss_and_gradients(build(False, name), inputs)
    scanned, gradients, _ = loss_and_gradients(build(True, name), inputs)
    assert scanned == pytest.approx(value, rel=1e-6)
    assert_close(grads, gradients, relative=1e-6)


@pytest.mark.parametrize(
    ("remat", "products", "kept"),
    [
        # x, query, key, value, scores, weighted values, out, up; two sums in each norm; maximum and sum of the softmax.
        ("none", 7, 14),
        pytest.param("dots", 5, 6, marks=pytest.mark.slow),  # not the products of the attention
        ("full", 0, 1),  # x
    ],
)
def test_the_loop_keeps_for_its_backward_pass_what_costs_much_to_compute(remat, products, kept):
    """Not every value that the backward pass reads, as loops do by themselves: 28."""
    made = build(True, remat=remat)
    structure, params, _ = take_apart(made)
    grad = jax.make_jaxpr(jax.grad(lambda params: jnp.mean(structure.assemble(params, {})(TOKENS))))(params)
    forward, backward = (eqn for eqn in grad.eqns if eqn.primitive.name == "scan")
    assert len(forward.outvars) - 1 == kept
    found = [
        sum(eqn.primitive.name == "dot_general" for _, eqn in equations(loop.params["jaxpr"]))
        for loop in (forward, backward)
    ]
    assert found == [8, 16 + 8 - 1 - products]  # the result of the last product, down, is never read


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_what_is_recomputed_changes_nothing(remat):
    value, grads, _ = loss_and_gradients(build(True, dropout=0.5))
    again, gradients, _ = loss_and_gradients(build(True, dropout=0.5, remat=remat))
    assert again == pytest.approx(value, rel=1e-6)
    assert_close(grads, gradients, relative=1e-6)


@pytest.mark.slow
def test_in_float16_the_difference_is_rounding():
    value, grads, _ = loss_and_gradients(build(False, policy="mixed_float16"))
    scanned, gradients, _ = loss_and_gradients(build(True, policy="mixed_float16"))
    assert scanned == pytest.approx(value, rel=1e-3)
    assert_close(grads, gradients, relative=2e-2)


@pytest.mark.slow
def test_blocks_drop_the_same_features_as_one_by_one():
    """The keys of their random streams are those of single blocks, and so are the counters afterwards."""
    (value, grads, counts), (scanned, gradients, others) = (
        loss_and_gradients(build(scan, dropout=0.5)) for scan in (False, True)
    )
    assert scanned == pytest.approx(value, rel=1e-6)
    assert_close(grads, gradients, relative=1e-6)
    assert {name: int(count) for name, count in counts.items()} == {name: int(count) for name, count in others.items()}
    assert int(counts["blocks/2/dropout/rngs/count"]) == 2


@pytest.mark.slow
def test_random_streams_have_the_numbers_of_single_blocks_in_deep_models_too():
    numbers = []
    for scan in (False, True):
        streams = take_apart(nnx.eval_shape(lambda scan=scan: build(scan, depth=12, dropout=0.1)))[0].streams
        keys = [stream.index for stream in streams if stream.is_key]
        numbers.append([*itertools.chain(*(key if isinstance(key, tuple) else (key,) for key in keys))])
    assert len(numbers[0]) == 13
    assert numbers[0] == numbers[1]


def test_the_jaxpr_of_the_gradient_has_as_many_equations_for_six_blocks_as_for_three():
    def count(depth):
        structure, params, _ = take_apart(nnx.eval_shape(lambda: build(True, depth=depth)))
        grad = jax.grad(lambda params: jnp.mean(structure.assemble(params, {})(TOKENS)))
        return sum(1 for _ in equations(jax.make_jaxpr(grad)(params)))

    assert count(3) == count(6) > 100


@pytest.mark.slow
def test_a_rule_for_all_blocks_holds_in_both_forms():
    policy = "mixed_float16;blocks/*/mlp/up=float32"
    outputs = [build(scan, policy=policy)(TOKENS) for scan in (False, True)]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-3)
    stack = build(True, policy=policy).blocks
    assert stack.all.mlp.up.dtype == jnp.float32
    assert stack.all.mlp.down.dtype == jnp.float16


class Squares(nnx.Module):
    """No dtype, and squares of 300 x that pass 65,504."""

    def __init__(self, *, rngs):
        del rngs
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        y = 300 * x
        return y * jax.lax.rsqrt(jnp.mean(y * y)) * self.scale[...].astype(x.dtype)


@pytest.mark.parametrize("rule", ["blocks", "blocks/all", "type:Squares"])
def test_a_rule_casts_what_enters_and_leaves_blocks_without_a_dtype(rule):
    model = nnx.Dict(blocks=in_series(Squares, 2, rngs=nnx.Rngs(0), scan=True))
    apply_policy(model, f"mixed_float16;{rule}=float32")
    outputs = model.blocks(jnp.ones(2, jnp.float16))
    assert (outputs.dtype, outputs.tolist()) == (np.float16, [1.0, 1.0])


@pytest.mark.parametrize("pattern", ["blocks/1/mlp/up", "blocks/[!0]*", "blocks/?/mlp", "*1/mlp"])
def test_a_rule_for_some_blocks_is_an_error_that_says_what_to_write(pattern):
    made = nnx.eval_shape(lambda: build(True))
    with pytest.raises(UsageError, match=r"for some of the 3 blocks in blocks.*write 'blocks/\*'.*no_scan_blocks"):
        require_alike(made, [pattern], "--precision.rules")


@pytest.mark.parametrize("pattern", ["blocks/*/mlp", "blocks/all/mlp", "blocks", "*/mlp/*", "type:Attention", "norm"])
def test_a_rule_for_all_blocks_passes(pattern):
    require_alike(nnx.eval_shape(lambda: build(True)), [pattern], "--precision.rules")


def test_a_library_user_hears_that_a_single_block_is_no_path_of_the_model():
    with pytest.raises(UsageError, match="rule 'blocks/1/mlp' matches nothing; nearest: blocks/all/mlp"):
        build(True, policy="mixed_float16;blocks/1/mlp=float32")


def test_the_blocks_of_a_stack_come_out_one_by_one():
    made = build(True)
    single = one_by_one(made)
    assert isinstance(made.blocks, Stack)
    assert [type(block).__name__ for block in single.blocks] == ["Block"] * 3
    np.testing.assert_allclose(single(TOKENS), made(TOKENS), rtol=1e-5)
    single.blocks[0].mlp.up.kernel[...] = jnp.zeros((8, 32))
    assert bool(jnp.any(made.blocks.all.mlp.up.kernel[0]))  # a copy
    assert one_by_one(single) is single


class Narrow(nnx.Module):
    def __init__(self, *, rngs):
        del rngs

    def __call__(self, x):
        return x.astype(jnp.float16)


def test_arrays_that_a_state_does_not_have_are_none_for_each_block():
    assert apart({"blocks/all/norm/scale": None, "head": 1}, {"blocks": 2}) == {
        "blocks/0/norm/scale": None,
        "blocks/1/norm/scale": None,
        "head": 1,
    }


def test_a_block_that_changes_the_dtype_is_an_error():
    stack = in_series(Narrow, 2, rngs=nnx.Rngs(0), scan=True)
    with pytest.raises(UsageError, match=r"a block makes float16\[2\] of float32\[2\]"):
        stack(jnp.ones(2))


def test_blocks_of_different_structure_are_an_error():
    with pytest.raises(UsageError, match="block 1 differs from block 0 in structure"):
        Stack([nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))])


def test_of_dropout_the_loop_keeps_a_byte_for_each_value():
    structure, params, _ = take_apart(build(True, dropout=0.5))
    grad = jax.make_jaxpr(jax.grad(lambda params: jnp.mean(structure.assemble(params, {}, jax.random.key(0))(TOKENS))))(
        params
    )
    forward = next(eqn for eqn in grad.eqns if eqn.primitive.name == "scan")
    masks = [var.aval.shape for var in forward.outvars[1:] if var.aval.dtype == bool]
    others = {var.aval.dtype.name for var in forward.outvars[1:] if var.aval.ndim > 1}
    assert masks == [(3, 2, 6, 8)] * 2
    assert others == {"bool", "float32"}


@pytest.mark.parametrize(("lora", "remat"), [(False, "none"), (True, "none"), (True, "dots")])
def test_the_loop_of_a_decoder_keeps_no_features_in_float32(lora, remat):
    """Neither rotated queries and keys, which are cheap to rotate again, nor what adapters add to rounded products."""
    layers = (LayerKind(rope=Rope()),) * 3
    settings = DecoderSettings(
        vocabulary=11, length=6, width=8, heads=2, key_heads=2, head_features=4, hidden=16, layers=layers
    )
    made = Decoder(settings, scan_blocks=True, rngs=nnx.Rngs(0))
    name_scopes(made)
    if lora:
        add_lora(made, ["blocks/*"], rank=3, rngs=nnx.Rngs(1))
    apply_policy(made, "mixed_bfloat16")
    apply_remat(made, remat)
    structure, params, _ = take_apart(made)
    grad = jax.make_jaxpr(jax.grad(lambda params: jnp.mean(structure.assemble(params, {})(TOKENS))))(params)
    forward = next(eqn for eqn in grad.eqns if eqn.primitive.name == "scan")
    features = [var.aval for var in forward.outvars[1:] if var.aval.shape[-1:] != (6,) and var.aval.ndim > 3]
    assert len(features) >= 7  # of query, key, value, out, gate, up and what enters a block
    assert {value.dtype.name for value in features} == {"bfloat16"}
