"""What a traced function asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mpjax.plan import Module, traced_program
from mpjax.precision.casting import full_precision
from mpjax.precision.float8 import FLOAT8, MXFP8, product


X = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
W = jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)


def asked(fn, *args):
    return traced_program(jax.make_jaxpr(fn)(*args))


def test_a_gradients_products_are_asked_for_by_module_and_pass():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.square(x @ w))

    forward, backward = asked(jax.grad(loss), W, X).products
    assert (forward.module, backward.module) == (Module("head", False), Module("head", True))
    assert (forward.operands, forward.result, forward.size) == (("bfloat16", "bfloat16"), "bfloat16", 64)
    assert forward.differentiated
    assert backward.differentiated


def test_what_no_output_needs_is_not_asked_for_also_inside_a_call():
    @jax.jit
    def inner(x, w):
        return x @ w, x + x

    assert asked(lambda x, w: inner(x, w)[1], X, W).products == ()
    assert len(asked(lambda x, w: inner(x, w)[0], X, W).products) == 1


def test_the_body_of_a_loop_counts_once():
    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    (product,) = asked(lambda w: jax.lax.scan(lambda x, _: (x @ w, None), w, length=9)[0], square).products
    assert product.in_loop


def test_a_quantised_operand_is_asked_for_in_the_dtype_that_it_was_quantised_to():
    def quantised(x, w):
        scale = jnp.bfloat16(2)
        x = (x / scale).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) * scale
        return x.reshape(8, 4) @ w

    (product,) = asked(quantised, X, W).products
    assert (product.operands, product.quantised) == (("bfloat16", "float8_e4m3fn"), True)
    (product,) = asked(lambda x, w: jnp.tanh(x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)) @ w, X, W).products
    assert (product.operands, product.quantised) == (("bfloat16", "bfloat16"), False)


def test_products_of_blocks_that_a_cpu_multiplies_out_are_told():
    def fn(x, w):
        return product(x, w, MXFP8, np.dtype("float32"))

    x, w = (jax.ShapeDtypeStruct((32, 32), jnp.float32) for _ in range(2))
    assert {(each.operands, each.blocks) for each in asked(fn, x, w).products} == {(("float8_e4m3fn",) * 2, True)}
    (plain,) = asked(lambda x, w: product(x, w, FLOAT8, np.dtype("float32")), x, w).products
    assert (plain.operands, plain.blocks) == (("float8_e4m3fn",) * 2, False)


def test_full_precision_and_constants_are_told():
    (product,) = asked(full_precision(lambda x, w: x @ w), X, W).products
    assert product.kept
    (product,) = asked(lambda x: x + jnp.ones((8, 4), x.dtype) @ jnp.ones((4, 4), x.dtype), X).products
    assert product.constant


def test_products_of_the_same_operands_are_the_same():
    first, second, third = asked(lambda x, w: (x @ w, x @ w, (x + x) @ w), X, W).products
    assert first.same == second.same != third.same


def test_products_of_operands_that_are_computed_twice_are_the_same():
    """XLA computes them once: the same operations on the same values, numbers and arrays."""

    def twice(x, w):
        return jnp.tanh(2.0 * x) @ w, jnp.tanh(2.0 * x) @ w, jnp.tanh(3.0 * x) @ w, jnp.sin(2.0 * x) @ w

    first, second, *others = traced_program(jax.make_jaxpr(twice)(*[jnp.ones((2, 2))] * 2)).products
    assert first.same == second.same
    assert first.same not in [other.same for other in others]


def test_products_of_parts_or_shards_of_one_array_or_by_other_parameters_are_not_the_same():
    """The receipt would take the dtypes in which the one runs for those of the other."""
    x = jnp.ones((4, 4))

    def distinct(fn, *args):
        products = traced_program(jax.make_jaxpr(fn)(x, *args)).products
        return len({product.same for product in products}), len(products)

    assert distinct(lambda x, w: [part @ w for part in jnp.split(x, 2)], x) == (2, 2)
    assert distinct(lambda x, w: [part @ w for part in jnp.linalg.qr(x)], x) == (2, 2)
    assert distinct(lambda x, w: [jnp.dot(x, w, precision=bits) for bits in ("highest", None)], x) == (2, 2)
    groups = jnp.array([1, 3])
    experts = jnp.ones((2, 4, 4))
    assert distinct(lambda x, w: [jax.lax.ragged_dot(x, w, n) for n in (groups, groups[::-1])], experts) == (2, 2)

    def convolution(image, window, step):
        return jax.lax.conv_general_dilated(image[None, None], window, (1, 1), "SAME", rhs_dilation=(step, step))

    assert distinct(lambda x, w: [convolution(x, w, step) for step in (1, 2)], x[None, None]) == (2, 2)

    def divided(x, w, rows, columns):
        mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
        product = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, columns), out_specs=P(), check_vma=False)
        return product(x, w)

    places = (P("d"), P()), (P(None, "d"), P("d")), (P("d"), P())
    assert distinct(lambda x, w: [divided(x, w, *specs) for specs in places], x) == (2, 3)


def test_a_kernel_with_a_product_inside_is_asked_for_and_one_without_is_not():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    def doubled(x, out):
        out[...] = x[...] + x[...]

    out = jax.ShapeDtypeStruct((8, 2), jnp.bfloat16)
    (found,) = asked(pallas.pallas_call(kernel, out_shape=out, interpret=True), X, W).products
    assert (found.kind, found.operands) == ("kernel", ("bfloat16", "bfloat16"))
    assert asked(pallas.pallas_call(doubled, out_shape=X, interpret=True), X).products == ()


def test_integer_products_are_left_out():
    numbers = jax.ShapeDtypeStruct((4, 4), jnp.int32)
    assert asked(lambda x: x @ x, numbers).products == ()


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 1)])
def test_sums_are_those_over_several_devices(size, count):
    mesh = Mesh(np.asarray(jax.devices()[:size]), ("data",))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    assert asked(jax.jit(total), X).sums == ("bfloat16",) * count


MOVES = {
    "none": lambda x: x,
    "broadcast": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
    "gather": lambda x: x[jnp.array([1, 0, 1])],
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "all_gather": lambda x: jax.lax.all_gather(x, "data"),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
    "ppermute": lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    "cummax": jax.lax.cummax,
    "pool": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "VALID"),
    "scatter": lambda x: x.at[0].max(x[1]),
}


@pytest.mark.parametrize(("spec", "move"), [(P(), "none"), (P(), "tile"), *((P("data"), move) for move in MOVES)])
def test_a_value_that_was_cast_before_a_sum_over_devices_stays_so_by_moves(spec, move):
    """Replicated inputs are made varying (`pvary`) between the cast and the sum."""

    def total(x):
        return jax.lax.psum(MOVES[move](x.astype(jnp.bfloat16).astype(jnp.float32)), "data")

    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    summed = jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=P())
    assert asked(jax.jit(summed), jax.ShapeDtypeStruct((8, 4), jnp.float32)).cast == ("bfloat16",)


def test_gradients_among_the_outputs_are_told_from_updated_parameters():
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(x @ w))(w)
        return gradient.astype(jnp.float32) * jnp.float32(0.5), w - gradient

    assert asked(step, W, X).gradients == (True, False)
