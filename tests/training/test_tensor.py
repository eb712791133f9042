"""Which layers are divided over the mesh axis `tensor`, and along which axis."""

import functools

import jax
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import Block, in_series, quantise
from mpjax.training import tensor_axes


class Net(nnx.Module):
    """Layers of every kind that can be divided, and one that cannot."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 12, rngs=rngs)
        self.down = nnx.Linear(12, 4, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)


@pytest.fixture(scope="module")
def net():
    return nnx.eval_shape(Net)


def test_a_transformer_is_divided_by_heads_and_by_hidden_units():
    """As Megatron-LM does: the first layer by its outputs, the second by its inputs, norms not at all."""
    block = nnx.eval_shape(lambda: nnx.Dict(block=Block(8, 4, rngs=nnx.Rngs(0))))
    assert tensor_axes(block, 2, {}) == {
        **{f"block/attention/{name}/kernel": 1 for name in ("query", "key", "value")},
        **{f"block/attention/{name}/bias": 0 for name in ("query", "key", "value")},
        "block/attention/out/kernel": 0,
        "block/mlp/up/kernel": 1,
        "block/mlp/up/bias": 0,
        "block/mlp/down/kernel": 0,
    }


def test_columns_are_outputs_and_rows_are_inputs(net):
    rules = {"up": "columns", "down": "rows", "conv": "columns"}
    assert tensor_axes(net, 2, rules) == {
        "up/kernel": 1,
        "up/bias": 0,
        "down/kernel": 0,
        "conv/kernel": 3,
        "conv/bias": 0,
    }
    assert tensor_axes(net, 2, {"conv": "rows"}) == {"conv/kernel": 2}


def test_the_first_rule_that_matches_wins_also_over_those_for_transformers():
    block = nnx.eval_shape(lambda: nnx.Dict(block=Block(8, 4, rngs=nnx.Rngs(0))))
    found = tensor_axes(block, 2, {"block/attention": "whole", "block/mlp/down": "whole"})
    assert found == {"block/mlp/up/kernel": 1, "block/mlp/up/bias": 0}


@pytest.mark.parametrize(
    ("rules", "parts", "message"),
    [
        ({"upp": "columns"}, 2, "rule 'upp' matches nothing; nearest: up"),
        ({"norm": "columns"}, 2, "--mesh.rules norm: names no linear layer or convolution"),
        ({}, 2, "--mesh.tensor 2 divides no layer of Net: name its layers, as in --mesh.rules"),
        (
            {"up": "columns"},
            5,
            "--mesh.tensor 5 does not divide up, which has 12 outputs or heads: wanted one of 1, 2",
        ),
        ({"up": "rows"}, 3, "--mesh.tensor 3 does not divide up, which has 4 inputs or heads: wanted one of 1, 2, 4"),
    ],
)
def test_rules_that_divide_nothing_are_refused(net, rules, parts, message):
    with pytest.raises(UsageError) as raised:
        tensor_axes(net, parts, rules)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_weight_in_codes_is_not_divided(kind):
    model = nnx.eval_shape(Net)
    quantise(model.up, kind)
    with pytest.raises(UsageError, match="--mesh.tensor 2 divides up, and --training.lora_base int8 and nf4 store its"):
        tensor_axes(model, 2, {"up": "columns"})
    assert tensor_axes(model, 2, {"down": "rows"}) == {"down/kernel": 0}


def test_no_array_is_created(net):
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(net)))


def test_the_axes_of_a_stack_come_after_that_of_its_blocks():
    make = functools.partial(Block, 8, 4)
    model = nnx.eval_shape(lambda: nnx.Dict(blocks=in_series(make, 2, rngs=nnx.Rngs(0), scan=True)))
    assert tensor_axes(model, 2, {}) == {
        **{f"blocks/all/attention/{name}/kernel": 2 for name in ("query", "key", "value")},
        **{f"blocks/all/attention/{name}/bias": 1 for name in ("query", "key", "value")},
        "blocks/all/attention/out/kernel": 1,
        "blocks/all/mlp/up/kernel": 2,
        "blocks/all/mlp/up/bias": 1,
        "blocks/all/mlp/down/kernel": 1,
    }
