"""Operations counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.precision.casting import flops_of, product_flops


def counted(function, *shapes, dtype=jnp.bfloat16):
    return flops_of(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))


@pytest.mark.parametrize(
    ("dtype", "name"), [(jnp.bfloat16, "bfloat16"), (jnp.float16, "float16"), (jnp.float32, "tensorfloat32")]
)
def test_a_product_is_two_operations_for_each_pair_of_numbers(dtype, name):
    assert counted(lambda x, w: jnp.maximum(x @ w, 0), (8, 3), (3, 5), dtype=dtype) == {name: 2 * 8 * 3 * 5}


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (jax.lax.Precision.HIGHEST, "float32"),
        (jax.lax.Precision.HIGH, "tensorfloat32"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "float32"),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, "tensorfloat32"),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "bfloat16"),
    ],
)
def test_the_precision_of_a_float32_product_says_what_its_operands_are_rounded_to(precision, name):
    product = functools.partial(jnp.matmul, precision=precision)
    assert counted(product, (8, 3), (3, 5), dtype=jnp.float32) == {name: 240}


def test_integers_and_flags_are_left_out():
    assert counted(lambda x, w: x @ w, (8, 3), (3, 5), dtype=jnp.int32) == {}


def test_one_equation_counts_whatever_its_dtype():
    eqns = jax.make_jaxpr(lambda x, w: jnp.maximum(x @ w, 0))(jnp.ones((8, 3), int), jnp.ones((3, 5), int)).eqns
    assert {eqn.primitive.name: product_flops(eqn) for eqn in eqns} == {"dot_general": 2 * 8 * 3 * 5, "max": 0}


def test_a_batch_of_products_with_its_backward_pass_is_three_times_as_much():
    def loss(x, w):
        return jnp.sum(jnp.einsum("bij,bjk->bik", x, w).astype(jnp.float32))

    once = 2 * 4 * 8 * 3 * 5
    assert counted(loss, (4, 8, 3), (4, 3, 5)) == {"bfloat16": once}
    assert counted(jax.grad(loss, argnums=(0, 1)), (4, 8, 3), (4, 3, 5)) == {"bfloat16": 3 * once}


def test_a_loop_counts_as_often_as_it_runs():
    def steps(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=6)[0]

    assert counted(steps, (8, 3), (3, 3)) == {"bfloat16": 6 * 2 * 8 * 3 * 3}


def convolution(stride: int, padding: str, groups: int = 1):
    def convolve(x, w):
        dimensions = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        return jax.lax.conv_general_dilated(
            x, w, strides, padding, dimension_numbers=dimensions, feature_group_count=groups
        )

    return convolve


def test_a_convolution_without_padding():
    """Images of 4 x 4, kernels of 3 x 3: 2 x 2 places."""
    assert counted(convolution(1, "VALID"), (7, 4, 4, 5), (3, 3, 5, 6)) == {"bfloat16": 2 * 7 * 6 * 5 * (2 * 2) * 9}


def test_products_with_padding_are_not_counted():
    """Along one side of 4 pixels a kernel of 3 has 2 + 3 + 3 + 2 pixels under it."""
    assert counted(convolution(1, "SAME"), (7, 4, 4, 5), (3, 3, 5, 6)) == {"bfloat16": 2 * 7 * 6 * 5 * 10 * 10}


def test_groups_see_their_own_channels():
    assert counted(convolution(1, "VALID", 4), (7, 4, 4, 8), (3, 3, 2, 12)) == {"bfloat16": 2 * 7 * 12 * 2 * 4 * 9}


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_each_gradient_of_a_convolution_is_as_much_work_as_the_convolution(stride, padding):
    """The zeros that a stride puts between the pixels of the backward pass are no work."""
    convolve = convolution(stride, padding)

    def loss(x, w):
        return jnp.sum(convolve(x, w).astype(jnp.float32))

    shapes = (2, 8, 8, 3), (3, 3, 3, 4)
    once = counted(convolve, *shapes)["bfloat16"]
    assert counted(jax.grad(loss, argnums=(0, 1)), *shapes) == {"bfloat16": 3 * once}
