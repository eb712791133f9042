"""Adapters change nothing at first, add what they should in every dtype, and become part of the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.errors import UsageError
from mpjax.models import Adapter, add_lora, in_series, merge_lora


def linear(kernel, bias=None):
    kernel = jnp.asarray(kernel, jnp.float32)
    layer = nnx.Linear(*kernel.shape, use_bias=bias is not None, rngs=nnx.Rngs(0))
    layer.kernel[...] = kernel
    if bias is not None:
        layer.bias[...] = jnp.asarray(bias, jnp.float32)
    return layer


def adapted(layer, a, b, **settings):
    """A sequence of one layer, with these arrays in its adapter."""
    model = nnx.Sequential(layer)
    assert add_lora(model, ["layers/0"], rank=len(b), rngs=nnx.Rngs(1), **settings) == ["layers/0"]
    layer.lora_a[...], layer.lora_b[...] = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    return model


X = jnp.array([[1.0, 2.0]])
A, B = [[1, 0, 1, 0], [0, 1, 0, 1]], [[1, 0], [0, 1], [1, 0], [0, 1]]


@pytest.mark.parametrize(("variant", "expected"), [("lora", [5, 11]), ("rslora", [9, 19])])
def test_the_product_of_an_adapter_is_added_times_alpha_over_the_rank_or_its_root(variant, expected):
    """x W = (1, 3) with W = ((1, 1), (0, 1)), and x A B = (2, 4) of rank 4, times 8 / 4 or 8 / 2; no bias."""
    model = adapted(linear([[1, 1], [0, 1]]), A, B, alpha=8.0, variant=variant)
    np.testing.assert_array_equal(model(X), [expected])


def test_the_columns_of_dora_have_the_trained_norms():
    """W = ((3, 0), (4, 1)) has norms 5 and 1. With A B = ((0, 4), (0, 2)) its second column is (4, 3), of norm 5."""
    layer = linear([[3, 0], [4, 1]], bias=[10, 20])
    model = adapted(layer, [[1], [0.5]], [[0, 4]], alpha=1.0, variant="dora")
    np.testing.assert_array_equal(layer.magnitude[...], [5, 1])
    np.testing.assert_allclose(model(X), [[10 + 11, 20 + (1 * 4 + 2 * 3) / 5]], rtol=1e-6)
    layer.magnitude[...] = jnp.array([10.0, 5.0])
    np.testing.assert_allclose(model(X), [[10 + 22, 20 + 10]], rtol=1e-6)
    merge_lora(model)
    np.testing.assert_allclose(layer.kernel[...], [[6, 4], [8, 3]], rtol=1e-6)
    np.testing.assert_allclose(model(X), [[32, 30]], rtol=1e-6)


def test_a_column_of_zeros_stays_zero_with_dora():
    model = adapted(linear([[1, 0], [0, 0]]), [[0], [0]], [[0, 0]], variant="dora")
    np.testing.assert_array_equal(model(X), [[1, 0]])


@pytest.mark.parametrize(("dtype", "step"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_what_an_adapter_adds_is_rounded_once_with_the_output(dtype, step):
    """The layer gives half a step of 1, and the adapter 1 and half a step: rounded before, it would add 1 alone."""
    model = adapted(linear([[step / 2], [0]]), [[1, step / 2], [0, 0]], [[1], [1]], alpha=2.0)
    mpjax.apply_policy(model, f"params=float32,compute={dtype},output=float32")
    assert float(model(jnp.array([[1.0, 0.0]]))[0, 0]) == 1 + step


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_a_first_step_computes_what_the_base_computes(policy, variant):
    model = nnx.Sequential(nnx.Linear(16, 24, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(24, 4, rngs=nnx.Rngs(1)))
    mpjax.apply_policy(model, policy)
    x = jax.random.normal(jax.random.key(2), (8, 16))
    before = np.asarray(model(x))
    add_lora(model, ["*"], rank=4, variant=variant, rngs=nnx.Rngs(3))
    np.testing.assert_array_equal(model(x), before)


def test_adapters_stay_float32_under_every_policy():
    model = adapted(linear(np.eye(2)), A, B)
    mpjax.apply_policy(model, "float16")
    layer = model.layers[0]
    assert (layer.kernel[...].dtype, layer.lora_a[...].dtype, layer.lora_b[...].dtype) == (
        jnp.float16,
        jnp.float32,
        jnp.float32,
    )


def test_several_axes_count_as_one():
    """A projection to 2 heads of 3 features and one back: adapters have the sizes of the matrices."""
    model = nnx.Sequential(
        nnx.LinearGeneral(4, (2, 3), rngs=nnx.Rngs(0)),
        nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=nnx.Rngs(1)),
    )
    add_lora(model, ["layers/*"], rank=2, rngs=nnx.Rngs(2))
    first, second = model.layers
    assert [layer.lora_a.shape + layer.lora_b.shape for layer in (first, second)] == [(4, 2, 2, 6), (6, 2, 2, 4)]
    assert float(jnp.max(jnp.abs(first.lora_a[...]))) <= 0.5  # 1 / sqrt(4)
    for layer in (first, second):
        layer.lora_b[...] = jax.random.normal(jax.random.key(3), layer.lora_b.shape)
    x = jax.random.normal(jax.random.key(4), (5, 4))
    expected = model(x)
    merge_lora(model)
    np.testing.assert_allclose(model(x), expected, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(expected))))
    assert not [name for name in vars(first) if "lora" in name]


class Stacked(nnx.Module):
    def __init__(self, *, scan):
        self.blocks = in_series(lambda rngs: nnx.Linear(2, 3, rngs=rngs), 3, rngs=nnx.Rngs(0), scan=scan)


def test_a_stack_begins_with_the_adapters_of_single_blocks():
    one_by_one, stack = Stacked(scan=False), Stacked(scan=True)
    for model in (one_by_one, stack):
        add_lora(model, ["blocks/*"], rank=2, variant="dora", rngs=nnx.Rngs(1))
    for name in ("lora_a", "lora_b", "magnitude"):
        rows = [getattr(block, name)[...] for block in one_by_one.blocks]
        np.testing.assert_allclose(getattr(stack.blocks.all, name)[...], rows, rtol=1e-6)
    assert not np.array_equal(one_by_one.blocks[0].lora_a[...], one_by_one.blocks[1].lora_a[...])
    merge_lora(stack)
    np.testing.assert_allclose(stack.blocks.all.kernel[...], [block.kernel[...] for block in one_by_one.blocks])


def test_a_loop_of_ones_own_trains_the_adapters_alone():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    add_lora(model, ["layers/0"], rank=1, rngs=nnx.Rngs(2))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=Adapter)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    grads = nnx.grad(lambda model: jnp.sum(jnp.square(model(X))), argnums=nnx.DiffState(0, Adapter))(model)
    optimizer.update(model, grads)
    after = nnx.to_pure_dict(nnx.state(model))
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), before, after)["layers"]
    assert same[0] == {"bias": True, "kernel": True, "lora_a": True, "lora_b": False}  # B is zero, so A has no gradient
    assert same[1] == {"bias": True, "kernel": True}


def test_a_merged_weight_is_rounded_once_to_the_dtype_of_the_weight():
    """1 + 2^-9 is between 1 and 1 + 2^-7: in bfloat16 it is 1."""
    layer = linear([[1.0]])
    model = adapted(layer, [[2.0**-9]], [[1]], alpha=1.0)
    layer.kernel.set_value(layer.kernel[...].astype(jnp.bfloat16))
    merge_lora(model)
    assert (layer.kernel[...].dtype, float(layer.kernel[0, 0])) == (jnp.bfloat16, 1.0)
    layer.kernel.set_value(jnp.ones((1, 1), jnp.bfloat16))
    add_lora(model, ["*"], rank=1, alpha=1.0, rngs=nnx.Rngs(1))
    layer.lora_a[...], layer.lora_b[...] = jnp.full((1, 1), 2.0**-9), jnp.ones((1, 1))
    merge_lora(model, dtype="float32")
    assert float(layer.kernel[0, 0]) == 1 + 2.0**-9


def test_a_merged_weight_that_overflows_is_an_error():
    model = adapted(linear([[60000.0]]), [[60000.0]], [[1]], alpha=1.0)
    with pytest.raises(UsageError, match="layers/0/kernel overflows in float16 with its adapter merged"):
        merge_lora(model, dtype="float16")


class Odd(nnx.Linear):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(1, 2, (3, 3), rngs=rngs)
        self.up = nnx.Linear(2, 2, rngs=rngs)
        self.odd = Odd(2, 2, rngs=rngs)
        self.each = nnx.LinearGeneral(2, 2, batch_axis={0: 3}, rngs=rngs)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["upp"], "--training.lora 'upp' matches nothing; linear layers near it: up"),
        (["stem"], r"--training.lora 'stem' matches no linear layer, only stem \(Conv\)"),
        (["up", "odd"], r"odd \(Odd\) has a __call__ of its own"),
        (["each"], r"each \(LinearGeneral\) has a weight for each example"),
        ([], "--training.lora: no pattern"),
    ],
)
def test_patterns_without_a_layer_to_adapt_are_errors(patterns, says):
    with pytest.raises(UsageError, match=says):
        add_lora(Net(), patterns, rngs=nnx.Rngs(0))


def test_a_second_adapter_and_settings_out_of_range_are_errors():
    model = Net()
    with pytest.raises(UsageError, match="rank 0, alpha 16.0: wanted a rank of at least 1"):
        add_lora(model, ["up"], rank=0, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="unknown variant 'qlora': wanted lora, rslora, dora"):
        add_lora(model, ["up"], variant="qlora", rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]
    add_lora(model, ["up"], rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match=r"up \(Linear\) has an adapter already"):
        add_lora(model, ["up"], rngs=nnx.Rngs(0))


def test_some_blocks_of_a_stack_cannot_have_adapters():
    with pytest.raises(UsageError, match="'blocks/1' is for some of the 3 blocks that blocks/all holds"):
        add_lora(Stacked(scan=True), ["blocks/1"], rngs=nnx.Rngs(0))


def test_patterns_name_classes_too():
    model = Stacked(scan=False)
    assert add_lora(model, ["type:Linear"], rngs=nnx.Rngs(0)) == ["blocks/0", "blocks/1", "blocks/2"]
