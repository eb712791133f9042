"""Sums that only derivatives have are in float32: of arrays that are gathered, broadcast, or read many times."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.precision import HALF
from mpjax.precision.casting import AS_TRACED, COMPARES, ENTERED, LOW, adding_to, equations, with_sums_in_float32


TERMS = 4000
ROWS = jnp.arange(TERMS) % 3
WEIGHTS = jnp.abs(jnp.sin(jnp.arange(float(TERMS))))[:, None]
POINTS = jax.random.normal(jax.random.key(2), (TERMS, 16))
KERNEL, X = (jnp.abs(jax.random.normal(jax.random.key(seed), (16, 16))) / 4 for seed in (0, 1))


def half(x):
    """A product, which autocast rounds to half precision."""
    return x @ KERNEL


def rows(x):
    return jnp.tile(half(x), (TERMS // 16, 1))


def in_every_step(x):
    array = half(x)
    step = lambda total, weight: (total + jnp.sum(array * weight[0]).astype(jnp.float32), None)  # noqa: E731
    return lax.scan(step, jnp.float32(0), WEIGHTS)[0]


def in_some_steps(x):
    array = half(x)
    in_one = lambda: jnp.sum(array).astype(jnp.float32)  # noqa: E731
    step = lambda total, w: (total + jax.lax.cond(w[0] > 0.5, in_one, lambda: jnp.float32(0)), None)  # noqa: E731
    return lax.scan(step, jnp.float32(0), WEIGHTS)[0]


def one_row_in_every_step(x):
    array = half(x)
    row = lambda i: jnp.sum(lax.dynamic_slice(array, (i % 16, 0), (1, 16))).astype(jnp.float32)  # noqa: E731
    return lax.scan(lambda total, i: (total + row(i), None), jnp.float32(0), jnp.arange(TERMS))[0]


def graph_layer(x):
    nodes = half(x)
    return jnp.sum(jax.ops.segment_max(jax.nn.relu(nodes[ROWS] - nodes[ROWS + 1] / 8) * WEIGHTS, ROWS + 1, 4))


def distances(x):
    a, b = half(x), POINTS
    squared = jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1)[None] - 2 * a @ b.T
    return jnp.sum(jnp.exp(-squared / 40) * WEIGHTS.T)


def window(x, start, operation):
    image = jnp.tile(half(x), (8, 8))[None, :, :, None]
    return jnp.sum(lax.reduce_window(image, start, operation, (1, 8, 8, 1), (1, 1, 1, 1), "SAME"))


def sampled(x):
    return jax.scipy.ndimage.map_coordinates(half(x), [WEIGHTS[:, 0] * 15] * 2, 1)


PROGRAMS = {
    "gather": lambda x: jnp.sum(half(x)[ROWS]),
    "take": lambda x: jnp.sum(jnp.take(half(x), ROWS, axis=0) * WEIGHTS),
    "take_along_axis": lambda x: jnp.sum(jnp.take_along_axis(half(x), jnp.tile(ROWS[:, None], 16), 0) * WEIGHTS),
    "pairs": lambda x: jnp.sum(half(x)[ROWS, ROWS] * WEIGHTS[:, 0]),
    "segment_sum": lambda x: jnp.sum(jax.ops.segment_sum(half(x)[ROWS] * WEIGHTS, ROWS, 3)),
    "segment_max": lambda x: jnp.sum(jax.ops.segment_max(half(x)[ROWS] * WEIGHTS, ROWS, 3)),
    "graph layer": graph_layer,
    "scatter": lambda x: jnp.sum(jnp.zeros((3, 16)).at[ROWS].add(half(x)[ROWS])),
    "broadcast": lambda x: jnp.sum(jnp.sin(half(x)[0][None] * WEIGHTS)),
    "tile": lambda x: jnp.sum(jnp.tile(half(x), (TERMS // 16, 1)) * WEIGHTS),
    "repeat": lambda x: jnp.sum(jnp.repeat(half(x), TERMS // 16, axis=0) * WEIGHTS),
    "outer product": lambda x: jnp.sum(jnp.outer(WEIGHTS[:, 0], half(x)[0])),
    "added to rows": lambda x: jnp.sum(half(jnp.tile(WEIGHTS, 16)) + half(x)[:1]),
    "multiplied with rows": lambda x: jnp.sum(half(jnp.tile(WEIGHTS, 16)) * half(x)[:1]),
    "scale and bias": lambda x: jnp.sum(jnp.tanh(jnp.tile(WEIGHTS, 16) * half(x)[:1] + half(x)[1:2])),
    "bias of a convolution": lambda x: jnp.sum(
        lax.conv(jnp.ones((4, 1, 32, 32)), jnp.ones((16, 1, 3, 3)), (1, 1), "SAME") + half(x)[0][None, :, None, None]
    ),
    "where": lambda x: jnp.sum(jnp.where(WEIGHTS > 0.5, half(x)[:1], half(x)[1:2])),
    "vmap": lambda x: jnp.sum(jax.vmap(lambda weight: jnp.sin(weight * half(x)[0]))(WEIGHTS)),
    "pad": lambda x: jnp.sum(jnp.pad(half(x), ((0, TERMS - 16), (0, 0)), mode="edge") * WEIGHTS),
    "resize": lambda x: jnp.sum(jax.image.resize(half(x), (256, 256), "nearest")),
    "resize linearly": lambda x: jnp.sum(jax.image.resize(half(x), (256, 256), "linear")),
    "coordinates": lambda x: jnp.sum(sampled(x)),
    "average pool": lambda x: window(x, 0.0, lax.add),
    "max pool": lambda x: window(x, -jnp.inf, lax.max),
    "patches": lambda x: jnp.sum(
        lax.conv_general_dilated_patches(jnp.tile(half(x), (4, 4))[None, None], (8, 8), (1, 1), "SAME")
    ),
    "ties": lambda x: jnp.sum(jnp.max(jnp.tile(half(x)[0], (TERMS, 1)), 0) * TERMS),
    "ties with a number": lambda x: jnp.sum(jnp.maximum(half(x)[:1], half(x)[:1] * jnp.ones_like(WEIGHTS)) * WEIGHTS),
    "scattered ties": lambda x: jnp.sum((half(x) * 0).at[ROWS].max(half(x)[ROWS]) * TERMS),
    "scattered minima": lambda x: jnp.sum((half(x) * 2).at[ROWS].min(half(x)[ROWS]) * TERMS),
    "pad with an element": lambda x: jnp.sum(
        lax.pad(half(x), half(x)[1, 1], ((0, TERMS - 16, 0), (0, 0, 0))) * WEIGHTS
    ),
    "pad with an element of NumPy's": lambda x: jnp.sum(
        jnp.pad(half(x), ((0, TERMS - 16), (0, 0)), constant_values=half(x)[1, 1]) * WEIGHTS
    ),
    "bound of a clip": lambda x: jnp.sum(jnp.clip(rows(x) * 0, half(x)[0, 0], None) * WEIGHTS),
    "scalar": lambda x: jnp.sum((rows(x) * half(x)[0, 0] + half(x)[1, 1]) * WEIGHTS),
    "sort": lambda x: jnp.sum(jnp.sort(jnp.tile(half(x)[0], (TERMS, 1)) * WEIGHTS, axis=0)),
    "distances": distances,
    "differences": lambda x: jnp.sum(jnp.exp(-jnp.sum((half(x)[:, None] - POINTS[None]) ** 2, -1) / 40)),
    "cumsum": lambda x: jnp.sum(jnp.cumsum(jnp.tile(half(x)[:1], (TERMS, 1)) * WEIGHTS, 0)) / TERMS,
    "many reads": lambda x: sum(jnp.sum(y * abs(np.sin(i))) for y in [half(x)] for i in range(300)),
    "many products": lambda x: sum(jnp.sum(y @ (KERNEL + i)) for y in [half(x)] for i in range(40)),
    "many shifts": lambda x: sum(jnp.sum(jnp.roll(y, i, 0) * WEIGHTS[:16]) for y in [half(x)] for i in range(40)),
    "copies of it": lambda x: jnp.sum(jnp.concatenate([half(x)] * 200) * WEIGHTS[:3200]),
    "scan": in_every_step,
    "scan with a branch": in_some_steps,
    "scan over rows": one_row_in_every_step,
    "map": lambda x: jnp.sum(lax.map(lambda weight: jnp.sin(weight * half(x)[0]), WEIGHTS)),
    "checkpoint": lambda x: jnp.sum(jax.checkpoint(lambda array: jnp.sin(array[ROWS] * WEIGHTS))(half(x))),
}


@pytest.mark.parametrize("policy", [pytest.param("mixed_float16", marks=pytest.mark.slow), "mixed_bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_is_within_a_hundredth_of_float32s(name, policy):
    def fn(x):
        return PROGRAMS[name](x) / TERMS

    wanted = jax.jit(jax.grad(fn))(X)
    found = jax.jit(jax.grad(mpjax.autocast(fn, policy)))(X)
    assert float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)) < 0.01


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_sum_of_a_gradient_is_in_half_precision(name):
    assert half_sums(jax.make_jaxpr(jax.grad(mpjax.autocast(PROGRAMS[name], "mixed_float16")))(X)) == []


def half_sums(jaxpr) -> list[str]:
    """Sums of 8 half-precision terms and more, in a jaxpr and in all that it holds."""
    eqns = [(eqn, eqn.invars[0].aval) for _, eqn in equations(jaxpr) if eqn.invars]
    return [eqn.primitive.name for eqn, operand in eqns if operand.dtype in HALF and terms(eqn, operand.shape) >= 8]


def terms(eqn, shape) -> float:
    params = eqn.params
    match eqn.primitive.name:
        case "reduce_sum":
            return math.prod(shape) / math.prod(eqn.outvars[0].aval.shape)
        case "scatter-add" | "scatter-sub":
            return math.prod(eqn.invars[1].aval.shape[:-1])
        case "reduce_window_sum" | "select_and_scatter_add":
            return math.prod(params["window_dimensions"]) / math.prod(params["window_strides"])
        case "cumsum":
            return shape[params["axis"]]
        case "reduce_scatter":
            return params["axis_size"]
        case "psum" | "psum_invariant":
            return math.inf
    return 0


ONE_ROW = jnp.zeros(16, int)

# Programs of a half-precision array of shape (16, 16), one for each primitive that needs parameters.
FORMS = {
    "broadcast_in_dim": lambda h: lax.broadcast(h, (8,)),
    "concatenate": lambda h: lax.concatenate([h, h], 0),
    "convert_element_type": lambda h: h.astype(jnp.float32),
    "cumlogsumexp": lax.cumlogsumexp,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumprod": lax.cumprod,
    "cumsum": lax.cumsum,
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (ROWS[1], 0), (8, 16)),
    "dynamic_update_slice": lambda h: lax.dynamic_update_slice(h, h[:8], (ROWS[1], 0)),
    "gather": lambda h: h[ROWS],
    "integer_pow": lambda h: lax.integer_pow(h, 3),
    "mul": lambda h: lax.mul(h, h[0, 0]) + lax.mul(h[1, 1], h),
    "pad": lambda h: lax.pad(h, h[0, 0], ((0, 8, 0), (0, 0, 0))),
    "reduce_max": lambda h: lax.reduce_max(h, (0,)),
    "reduce_min": lambda h: lax.reduce_min(h, (0,)),
    "reduce_precision": lambda h: lax.reduce_precision(h, 5, 5),
    "reduce_prod": lambda h: lax.reduce_prod(h, (0,)),
    "reduce_sum": lambda h: lax.reduce_sum(h, (0,)),
    "reduce_window_max": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (8, 8), (1, 1), "SAME"),
    "reduce_window_min": lambda h: lax.reduce_window(h, jnp.inf, lax.min, (8, 8), (1, 1), "SAME"),
    "reduce_window_sum": lambda h: lax.reduce_window(h, 0.0, lax.add, (8, 8), (1, 1), "SAME"),
    "reshape": lambda h: lax.reshape(h, (8, 32)),
    "rev": lambda h: lax.rev(h, (0,)),
    "scatter": lambda h: h.at[ONE_ROW[:4]].set(h[:4]),
    "scatter-add": lambda h: h.at[ONE_ROW].add(h),
    "scatter-max": lambda h: h.at[ONE_ROW].max(h),
    "scatter-min": lambda h: h.at[ONE_ROW].min(h),
    "scatter-mul": lambda h: h.at[jnp.arange(16)].multiply(h, unique_indices=True),
    "scatter-sub": lambda h: h.at[ONE_ROW].subtract(h),
    "select_and_scatter_add": lambda h: jax.vjp(FORMS["reduce_window_max"], h)[1](h)[0],
    "select_n": lambda h: lax.select_n(h > 0, h, h[::-1]),
    "slice": lambda h: lax.slice(h, (0, 0), (8, 16)),
    "split": lambda h: lax.split(h, (8, 8))[0],
    "squeeze": lambda h: lax.squeeze(h[None], (0,)),
    "tile": lambda h: jnp.tile(h, (8, 1)),
    "transpose": lambda h: lax.transpose(h, (1, 0)),
}

# Primitives whose derivatives add nothing: of integers, keys and comparisons, and moves without repetition.
NO_SUMS = frozenset(
    {
        *(
            "after_all",
            "and",
            "argmax",
            "argmin",
            "axis_index",
            "clz",
            "create_token",
            "empty2",
            "eq_to",
            "iota",
            "le_to",
        ),
        *("lt_to", "not", "or", "population_count", "reduce_and", "reduce_or", "reduce_xor", "shift_left", "xor"),
        *("shift_right_arithmetic", "shift_right_logical", "random_bits", "random_fold_in", "random_seed"),
        *("random_split", "rng_bit_generator", "rng_uniform", "threefry2x32", "conj", "imag", "real"),
        *("add_any", "approx_top_k", "custom_lin", "device_put", "name", "sharding_constraint", "sort", "top_k"),
    }
)

# Primitives of several devices; the cotangents of eight of them are tried below.
OF_DEVICES = frozenset({"all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all"})

PRIMITIVES = {value.name: value for name, value in vars(primitives).items() if name.endswith("_p")}
SKIPPED = NO_SUMS | OF_DEVICES | ENTERED | COMPARES | AS_TRACED | LOW


def forms(name):
    """Programs of a primitive and a half-precision array: one for each of its operands, which is a scalar."""
    if name in FORMS:
        return [FORMS[name]]
    bind = getattr(lax, name, PRIMITIVES[name].bind)

    def form(place, count):
        return lambda h: bind(*(h[1, 1] if place == i else lax.stop_gradient(h) for i in range(count)))

    candidates = [bind, *(form(place, count) for count in (2, 3) for place in range(count))]
    return [candidate for candidate in candidates if is_differentiable(candidate)]


def total(form):
    return lambda h: jnp.sum(form(h).astype(jnp.float32))


def is_differentiable(form):
    try:
        jax.make_jaxpr(jax.grad(total(form)))(X.astype(jnp.bfloat16))
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", sorted((PRIMITIVES.keys() | FORMS) - SKIPPED))
def test_no_derivative_of_a_primitive_adds_in_half_precision(name):
    tried = forms(name)
    assert tried or name in ("clamp", "nextafter", "zeta"), f"write a program of {name} in FORMS, or name it in NO_SUMS"
    for form in tried:
        by_policy = mpjax.autocast(lambda x, form=form: total(form)(half(x)), "mixed_bfloat16")
        by_itself = with_sums_in_float32(lambda x, form=form: total(form)(x.astype(jnp.bfloat16)))
        for fn in (by_policy, by_itself):
            assert half_sums(jax.make_jaxpr(jax.grad(fn))(X)) == []


@pytest.mark.parametrize(
    "local",
    [
        lambda w, x: jnp.mean((x @ w) ** 2),
        lambda w, x: jnp.mean(lax.all_gather(x @ w, "data") ** 2),
        lambda w, x: jnp.mean((x @ (w @ w)) ** 2),
    ],
    ids=["weight", "all_gather", "product of weights"],
)
def test_cotangents_of_eight_devices_are_added_in_float32(local):
    mesh = AbstractMesh((8,), ("data",), (AxisType.Auto,))

    def fn(w, x):
        mean = lambda w, x: lax.pmean(local(w, x), "data")  # noqa: E731
        return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)

    jaxpr = jax.make_jaxpr(jax.grad(mpjax.autocast(fn, "mixed_bfloat16")))(KERNEL, X)
    assert half_sums(jaxpr) == []
    assert any(eqn.primitive.name in ("psum_invariant", "psum") for _, eqn in equations(jaxpr))


def test_the_values_of_a_scan_and_its_derivative_forward_stay_as_they_are():
    def fn(x):
        return in_every_step(x) / TERMS

    value, slope = jax.jvp(mpjax.autocast(fn, "mixed_float16"), (X,), (jnp.ones_like(X),))
    np.testing.assert_allclose(value, fn(X), rtol=1e-3)
    np.testing.assert_allclose(slope, jnp.sum(jax.grad(fn)(X)), rtol=1e-3)


def test_each_read_of_an_array_adds_to_its_gradient_in_float32():
    x = jnp.ones((), jnp.bfloat16)

    def read(x):
        wide, array = x.astype(jnp.float32), lax.stop_gradient(x)
        return sum(adding_to(wide, array).astype(jnp.float32) for _ in range(300))

    assert (read(x), jax.grad(read)(x)) == (300.0, 300.0)
    assert jax.grad(lambda x: sum(x.astype(jnp.float32) for _ in range(300)))(x) == 256.0  # in bfloat16


def test_a_scan_that_runs_on_several_devices_adds_up_alike():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def fn(x, weights):
        def local(x, weights):
            array = half(x)
            step = lambda total, weight: (total + jnp.sum(array * weight[0]).astype(jnp.float32), None)  # noqa: E731
            zero = lax.pcast(jnp.float32(0), "data", to="varying")
            return lax.psum(lax.scan(step, zero, weights)[0], "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(x, weights) / TERMS

    wanted = jax.grad(fn)(X, WEIGHTS)
    found = jax.jit(jax.grad(mpjax.autocast(fn, "mixed_bfloat16")))(X, WEIGHTS)
    assert float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)) < 0.01
