"""Which parameters decay, and which Muon orthogonalizes: by what they are in the model, not by their number of axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from mpjax.config import Model, Optimizer
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.models import GPT2, add_lora, apart, build_model
from mpjax.training import Packing, kernels_of, take_apart, update_rule


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def vit(**settings):
    config = Model(name="vit_s16", width=8, depth=2, heads=2, patch=4, **settings)
    return build_model(config, fields=labelled_images(10, (8, 8, 3)), rngs=nnx.Rngs(0))


def gpt2(**settings):
    return GPT2(vocabulary=50, length=8, width=8, depth=2, heads=2, **settings, rngs=nnx.Rngs(0))


class RMSNorm(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones((2, 3)))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=(-2, -1), keepdims=True)) * self.scale[...]


class Own(nnx.Module):
    """A norm over two axes, a product over two, and a head."""

    def __init__(self, rngs):
        self.norm = RMSNorm()
        self.mix = nnx.LinearGeneral((2, 3), (2, 2), axis=(-2, -1), rngs=rngs)
        self.head = nnx.LinearGeneral((2, 2), 3, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.head(self.mix(self.norm(x)))


def decaying(model):
    _, params, _ = take_apart(model)
    return {name for name, decays in kernels_of(model).mask(params).items() if decays}


BLOCK = {"attention/query", "attention/key", "attention/value", "attention/out", "mlp/up", "mlp/down"}


def test_biases_of_attention_and_scales_of_norms_do_not_decay_with_two_axes():
    model = vit()
    assert model.blocks[0].attention.query.bias.shape == (2, 4)
    blocks = {f"blocks/{number}/{layer}/kernel" for number in range(2) for layer in BLOCK}
    assert decaying(model) == blocks | {"patches/kernel", "positions", "head/kernel"}
    assert decaying(Own(nnx.Rngs(0))) == {"mix/kernel", "head/kernel"}


def test_a_stack_decays_as_its_blocks():
    assert decaying(vit(scan_blocks=True)) == {name.replace("/0/", "/all/") for name in decaying(vit()) - _second()}


def _second():
    return {f"blocks/1/{layer}/kernel" for layer in BLOCK}


@pytest.mark.parametrize(
    ("name", "packs"),
    [("sgd", False), ("sgd", True), ("adamw", False), ("adamw", True), ("lion", True), ("lamb", False)],
)
def test_weight_decay_leaves_biases_of_attention_with_and_without_packing(name, packs):
    model = vit()
    _, params, stats = take_apart(model)
    kernels = kernels_of(model)
    tx = update_rule(Optimizer(name=name, weight_decay=0.5), lambda count: 0.1, kernels)
    packing = Packing.of(params, stats, kernels)
    params = {path: jnp.ones_like(param) for path, param in params.items()}
    stored = packing.pack(params) if packs else params
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, stored), tx.init(stored), stored)
    moved = {path for path, update in (packing.unpack(updates) if packs else updates).items() if np.any(update != 0)}
    assert moved == decaying(model)


def muon(model, params=None, **settings):
    return update_rule(
        Optimizer(name="muon", schedule="constant", weight_decay=0.0, **settings),
        optax.constant_schedule(0.1),
        kernels_of(model),
        params=params or take_apart(model)[1],
    )


def test_muon_orthogonalizes_the_projections_of_attention_and_neither_biases_embeddings_nor_the_head():
    model = gpt2()
    _, params, _ = take_apart(model)
    grads = {path: jax.random.normal(jax.random.key(1), param.shape) for path, param in params.items()}
    tx = muon(model)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    matrices = {f"blocks/{number}/{layer}/kernel" for number in range(2) for layer in BLOCK}
    for path in matrices:
        shape = (-1, 8) if path.endswith(("out/kernel", "down/kernel")) else (8, -1)
        matrix = np.reshape(updates[path], shape)
        widened = max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5
        values = np.linalg.svd(matrix, compute_uv=False) / (0.1 * widened)  # five iterations give 0.7 to 1.2
        assert np.all((values > 0.6) & (values < 1.3)), path
    for path in params.keys() - matrices:
        np.testing.assert_allclose(np.abs(updates[path]), 0.147367, rtol=1e-2, err_msg=path)  # NAdam's first step


def test_muon_updates_a_stack_as_its_blocks():
    single, stacked = gpt2(), gpt2(scan_blocks=True)
    together, of_blocks = take_apart(stacked)[1], take_apart(single)[1]
    grads = {path: jax.random.normal(jax.random.key(2), param.shape) for path, param in together.items()}
    stacks = {"blocks": 2}
    tx, txs = muon(single), muon(stacked)
    one, _ = jax.jit(tx.update)(apart(grads, stacks), tx.init(of_blocks), of_blocks)
    other, _ = jax.jit(txs.update)(grads, txs.init(together), together)
    other = apart(other, stacks)
    assert one.keys() == other.keys()
    for path, update in one.items():
        np.testing.assert_allclose(update, other[path], rtol=1e-4, atol=1e-6, err_msg=path)


def test_muon_refuses_stacks_where_a_block_depends_on_the_others():
    with pytest.raises(UsageError, match=r"--model\.no_scan_blocks"):
        muon(gpt2(scan_blocks=True), arguments={"adaptive": "True"})


def test_muon_without_a_hidden_linear_layer_is_an_error():
    config = Model(name="resnet18", width=8)
    model = build_model(config, fields=labelled_images(10, (8, 8, 3)), rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match=r"none besides a head is trained: write --optimizer\.name adamw"):
        muon(model)


def test_muon_where_only_other_parameters_are_trained_is_an_error():
    model = gpt2()
    trained = {path: param for path, param in take_apart(model)[1].items() if not path.startswith("blocks")}
    with pytest.raises(UsageError, match=r"none besides a head is trained: write --optimizer\.name adamw"):
        muon(model, params=trained)


def test_muon_orthogonalizes_the_matrices_of_adapters():
    model = gpt2()
    add_lora(model, ["blocks/*/mlp/up"], rank=2, rngs=nnx.Rngs(0))
    axes = kernels_of(model).dimension_numbers(take_apart(model)[1])
    assert axes["blocks/0/mlp/up/lora_a"] == axes["blocks/1/mlp/up/lora_b"] == MuonDimensionNumbers((-2,), (-1,))


def test_axes_of_ones_own_take_the_place_of_those_of_the_model():
    model = vit()
    tx = muon(model, arguments={"muon_weight_dimension_numbers": "None"})
    _, params, _ = take_apart(model)
    moments = {path for path, _ in jax.tree_util.tree_leaves_with_path(tx.init(params)[1].inner_states["muon"])}
    assert any("'head/kernel'" in jax.tree_util.keystr(path) for path in moments)
