"""Weights in blocks of codes are near what they were, and are dequantised again for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.models import NF4, add_lora, in_series, kernel_of, merge_lora, quantise


def test_nf4_has_the_numbers_of_the_paper():
    """Dettmers et al., 2023, appendix E, to six digits."""
    paper = [
        *(-1.0, -0.696193, -0.525073, -0.394917, -0.284441, -0.184773, -0.091050, 0.0),
        *(0.079580, 0.160930, 0.246112, 0.337915, 0.440710, 0.562617, 0.722957, 1.0),
    ]
    np.testing.assert_allclose(NF4, paper, atol=1e-6)


def layer_of(kernel):
    layer = nnx.Linear(*kernel.shape, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(kernel, jnp.float32)
    return layer


@pytest.mark.parametrize(
    ("kind", "stored", "bytes_of_codes"), [("nf4", [8, 8 * 0.44071, 0], 32), ("int8", [8, 8 * 56 / 127, 0], 64)]
)
def test_a_number_becomes_the_nearest_code_times_the_largest_of_its_block(kind, stored, bytes_of_codes):
    """8 is the largest of 64. 3.5 is 0.4375 of it, between 0.338 and 0.441 of NF4, and between 55 and 56 of 127."""
    kernel = np.zeros((1, 64))
    kernel[0, :2] = 8, 3.5
    layer = layer_of(kernel)
    quantise(layer, kind)
    assert (layer.kernel.get_value().nbytes, layer.kernel_scales[...].tolist()) == (bytes_of_codes, [8.0])
    np.testing.assert_allclose(kernel_of(layer)[0, :3], stored, rtol=1e-6)


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.153), ("int8", 0.5 / 127)])
def test_no_number_is_off_by_more_than_half_a_step_of_its_block(kind, most):
    """Shapes that do not fill a block too. The widest gap of NF4 is 0.304 of the largest."""
    kernel = np.random.default_rng(0).normal(size=(7, 30))
    layer = layer_of(kernel)
    quantise(layer, kind)
    flat = np.pad(np.abs(kernel.reshape(-1)), (0, 46)).reshape(-1, 64).max(axis=1)
    largest = np.repeat(flat, 64)[: kernel.size].reshape(kernel.shape)
    assert np.max(np.abs(kernel_of(layer) - kernel) / largest) <= most * 1.0001


def test_a_layer_computes_with_its_dequantised_weight_and_keeps_only_codes_for_the_backward_pass():
    layer = nnx.LinearGeneral(64, (4, 32), use_bias=False, rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer)
    mpjax.apply_policy(model, "mixed_bfloat16")
    quantise(layer, "nf4")
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    expected = jnp.einsum("bi,ihf->bhf", x, kernel_of(layer).astype(jnp.bfloat16))
    y, backward = jax.vjp(model, x)
    np.testing.assert_allclose(y, expected, atol=1e-2)
    kept = {leaf.dtype.name for leaf in jax.tree.leaves(backward) if leaf.size >= 64 * 4 * 32 / 2}
    assert kept == {"uint8"}


def test_stacked_blocks_have_the_codes_of_single_ones():
    class Stacked(nnx.Module):
        def __init__(self, *, scan):
            self.blocks = in_series(lambda rngs: nnx.Linear(8, 16, rngs=rngs), 2, rngs=nnx.Rngs(0), scan=scan)

    single, stack = Stacked(scan=False), Stacked(scan=True)
    for layer in (*single.blocks, stack.blocks.all):
        quantise(layer, "nf4")
    np.testing.assert_array_equal(stack.blocks.all.kernel[...], [block.kernel[...] for block in single.blocks])
    np.testing.assert_array_equal(kernel_of(stack.blocks.all), [kernel_of(block) for block in single.blocks])


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_merged_weight_is_that_of_the_codes_and_the_adapter(variant):
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    model, x = nnx.Sequential(layer), jax.random.normal(jax.random.key(1), (4, 16))
    quantise(layer, "int8")
    before = model(x)
    add_lora(model, ["*"], rank=2, variant=variant, rngs=nnx.Rngs(2))
    np.testing.assert_allclose(model(x), before, atol=1e-6)
    layer.lora_b[...] = jax.random.normal(jax.random.key(3), (2, 8))
    adapted = model(x)
    merge_lora(model)
    assert layer.kernel[...].dtype == jnp.float32
    np.testing.assert_allclose(model(x), adapted, atol=1e-5)
