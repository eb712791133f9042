"""Layer norm and the residual connection around it, with a backward pass by one kernel."""

import collections
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec, use_abstract_mesh

import mpjax
from mpjax.models import GPT2, ViT, backward, layer_norm_kernel
from mpjax.precision import apply_policy, name_scopes
from mpjax.precision.casting import bodies, equations


EPSILON = 1e-6


@functools.cache
def both():
    """The plain form, and the kernel's operations one by one."""
    kernel = functools.partial(layer_norm_kernel.backward, epsilon=EPSILON, interpret=True)
    return jax.jit(functools.partial(backward, epsilon=EPSILON)), jax.jit(kernel)


def inputs(rows: int, width: int, dtype) -> list[jax.Array]:
    """x, dy and dskip [rows, width] in a dtype, scale, and the statistics of x as Flax computes them."""
    keys = jax.random.split(jax.random.key(rows), 4)
    x, dy, dskip = (jax.random.normal(key, (rows, width)) for key in keys[:3])
    scale = jax.random.normal(keys[3], (width,))
    return with_statistics((2 * x + 1).astype(dtype), dy.astype(dtype), dskip.astype(dtype), scale)


def with_statistics(x, dy, dskip, scale) -> list[jax.Array]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=1)
    variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=1) - jnp.square(mean), 0)
    return [x, dy, dskip, scale, mean, variance]


def assert_same(results, expected):
    """At most one rounding apart in the dtype of each array, and 2e-6 of its largest value, as sums are ordered."""
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype
        rounding = 0 if other.dtype == jnp.float32 else float(jnp.finfo(other.dtype).eps)
        wide = np.asarray(other, np.float32)
        largest = np.max(np.abs(wide), initial=0, where=np.isfinite(wide))
        np.testing.assert_allclose(np.asarray(result, np.float32), wide, rtol=rounding, atol=2e-6 * largest)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 24, jnp.float32),
        (200, 24, jnp.float16),  # two programs, the second with 72 rows of 128
        (9, 768, jnp.bfloat16),  # three programs of four rows, the last with one
        *(
            pytest.param(rows, width, dtype, marks=pytest.mark.slow)
            for rows, width in [(1, 1), (7, 100), (5, 768), (4300, 16), (3, 5000)]
            for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
        ),
    ],
)
def test_the_kernel_computes_what_the_plain_form_computes(rows, width, dtype):
    plain, kernel = both()
    arrays = inputs(rows, width, dtype)
    assert_same(kernel(*arrays), plain(*arrays))


def test_a_program_adds_up_its_tiles_and_leaves_those_behind_the_last_row(monkeypatch):
    """50 rows in tiles of four: three programs of five tiles, of which the last has no row in two."""
    monkeypatch.setattr(layer_norm_kernel, "PROGRAMS", 3)
    plain, _ = both()
    arrays = inputs(50, 768, jnp.float32)
    jitted = jax.jit(functools.partial(layer_norm_kernel.backward, epsilon=EPSILON, interpret=True))
    assert_same(jitted(*arrays), plain(*arrays))
    text = str(jax.make_jaxpr(functools.partial(layer_norm_kernel.backward, epsilon=EPSILON))(*arrays))
    assert text.count("f32[3,768]") >= 2  # a row of sums for each program, added up in their order


def test_rows_of_equal_values_and_far_from_zero_have_the_gradients_of_the_plain_form():
    """Equal values have variance 0, and the variance of 30000 and 30000.25 is lost in float32."""
    plain, kernel = both()
    x, dy, dskip, scale, *_ = inputs(9, 24, jnp.float32)
    x = x.at[0].set(1.7).at[1].set(0).at[2].set(30000 + 0.25 * (jnp.arange(24.0) % 2)).at[3].add(1000)
    arrays = with_statistics(x, dy, dskip, scale)
    results = kernel(*arrays)
    assert all(bool(jnp.isfinite(result).all()) for result in results)
    assert_same(results, plain(*arrays))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", range(4), ids=["x", "dy", "dskip", "scale"])
def test_what_is_not_finite_stays_so_where_the_plain_form_has_it(where, value):
    plain, kernel = both()
    arrays = inputs(9, 24, jnp.float32)[:4]
    arrays[where] = arrays[where].at[(2, 5) if where < 3 else 5].set(value)
    arrays = with_statistics(*arrays)
    results, expected = kernel(*arrays), plain(*arrays)
    assert not all(bool(jnp.isfinite(result).all()) for result in expected)
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(jnp.isnan(result), jnp.isnan(other))
        np.testing.assert_array_equal(jnp.isinf(result), jnp.isinf(other))


def test_the_plain_form_is_flaxs_derivative_with_the_term_of_the_residual_connection():
    norm = nnx.LayerNorm(24, epsilon=EPSILON, rngs=nnx.Rngs(0))
    x, dy, dskip, scale, mean, variance = inputs(9, 24, jnp.float32)
    norm.scale[...] = scale
    graph, state = nnx.split(norm)
    _, pull = jax.vjp(lambda x, state: (nnx.merge(graph, state)(x), x), x, state)
    dx, dstate = pull((dy, dskip))
    expected = [dx, dstate["scale"].get_value(), dstate["bias"].get_value()]
    assert_same(backward(x, dy, dskip, scale, mean, variance, epsilon=EPSILON), expected)


IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))


def vit(norm_kernel: str, policy, **options) -> ViT:
    sizes = {"image_shape": (8, 8, 3), "num_classes": 10, "patch": 4, "width": 24, "depth": 2, "heads": 2}
    model = ViT(**sizes, norm_kernel=norm_kernel, rngs=nnx.Rngs(0), **options)
    name_scopes(model)
    apply_policy(model, policy)
    return model


def loss(model, images) -> jax.Array:
    return jnp.mean(jnp.square(model(images)))


def of_arrays(norm_kernel: str, policy, **options):
    """The loss as a function of the model's arrays and of images, and the arrays."""
    graph, arrays = nnx.split(vit(norm_kernel, policy, **options))
    return lambda arrays, images=IMAGES: loss(nnx.merge(graph, arrays), images), arrays


def distance(tree, other) -> float:
    """The norm of the difference relative to the norm."""

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    return float(norm(jax.tree.map(lambda a, b: a - b, tree, other)) / norm(other))


@pytest.mark.parametrize(
    ("policy", "options", "bound"),
    [
        ("float32", {}, 1e-6),
        ("mixed_float16", {}, 1e-3),
        pytest.param("mixed_bfloat16", {}, 5e-3, marks=pytest.mark.slow),
        pytest.param("mixed_float16", {"scan_blocks": True}, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_the_loss_keeps_every_bit_and_gradients_one_rounding_of_a_sum(policy, options, bound):
    (loss, grads), (expected, others) = (
        jax.jit(jax.value_and_grad(function))(arrays)
        for function, arrays in (of_arrays(kernel, policy, **options) for kernel in ("pallas", "xla"))
    )
    assert loss == expected
    assert distance(grads, others) < bound


def calls(function, *arrays) -> collections.Counter:
    """The equations of a function's gradient that hold other programs, by primitive."""
    return collections.Counter(
        body.callers[0].primitive.name
        for body in bodies(jax.make_jaxpr(jax.grad(function, allow_int=True))(*arrays))
        if body.callers
    )


@pytest.mark.parametrize("options", [{}, {"scan_blocks": True}])
def test_walks_see_the_operations_of_the_plain_form_in_the_scopes_of_their_norms(options):
    function, arrays = of_arrays("pallas", "mixed_bfloat16", **options)
    assert calls(function, arrays)["kernel_call"] == (2 if options else 4)
    traced = jax.make_jaxpr(jax.grad(function))(arrays)
    seen = [(scope, eqn) for scope, eqn in equations(traced) if "/norm" in scope]
    blocks = ["all"] if options else [0, 1]
    assert {scope for scope, _ in seen} == {f"blocks/{block}/norm{number}" for block in blocks for number in (1, 2)}
    assert {"kernel_call", "pallas_call"}.isdisjoint(eqn.primitive.name for _, eqn in seen)
    sums = [eqn for _, eqn in seen if eqn.primitive.name == "reduce_sum"]
    assert {eqn.invars[0].aval.dtype for eqn in sums} == {np.dtype("float32")}


@pytest.mark.parametrize("policy", ["float64", "type:norm", "blocks/*/norm?"])
def test_a_norm_in_another_dtype_than_float32_keeps_flaxs_derivative(policy):
    """Flax's norms need promotion where they do not compute in float32."""
    if policy != "float64":
        policy = mpjax.Policy("float32", "bfloat16", "float32", rules={policy: "bfloat16"})
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        function, arrays = of_arrays("pallas", policy)
        assert "kernel_call" not in calls(function, arrays)


@pytest.mark.slow
def test_autocast_casts_the_operations_of_the_plain_form():
    results = []
    for kernel in ("pallas", "xla"):
        function, arrays = of_arrays(kernel, "float32")
        cast = mpjax.autocast(function, "mixed_bfloat16")
        assert "kernel_call" not in calls(cast, arrays)
        results.append(jax.jit(jax.value_and_grad(cast))(arrays))
    (value, grads), (expected, others) = results
    assert value == expected
    assert distance(grads, others) < 1e-6


@pytest.mark.slow
def test_a_diagnosis_measures_what_it_measures_of_xlas_kernels():
    diagnoses = [
        mpjax.diagnose(vit(kernel, "float32"), loss, IMAGES, policy="mixed_float16") for kernel in ("pallas", "xla")
    ]
    diagnosis, other = diagnoses
    assert (diagnosis.verdict, diagnosis.path, diagnosis.operation) == (other.verdict, other.path, other.operation)
    norms, others = ({(row.path, row.direction) for row in each.table if "norm" in row.path} for each in diagnoses)
    assert norms == others


@pytest.mark.slow
def test_under_vmap_and_in_second_derivatives_the_plain_form_runs():
    (function, arrays), (other, same) = (of_arrays(kernel, "float32") for kernel in ("pallas", "xla"))

    def slope(function):
        def of_image(arrays, image):
            return jax.jvp(jax.grad(function), (arrays, image[None]), (arrays, image[None]))[1]

        return jax.jit(jax.vmap(of_image, (None, 0)))

    assert distance(slope(function)(arrays, IMAGES), slope(other)(same, IMAGES)) < 1e-5


@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_shard_map_the_gradients_of_scale_and_bias_are_those_of_all_devices(check_vma):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    results = []
    for kernel in ("pallas", "xla"):
        function, arrays = of_arrays(kernel, "float32")

        def grad(arrays, images, function=function):
            grads = jax.grad(function)(arrays, images)
            return grads if check_vma else jax.lax.psum(grads, "data")

        specs = PartitionSpec(), PartitionSpec("data")
        mapped = jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
        results.append(jax.jit(mapped)(arrays, IMAGES))
    assert distance(*results) < 1e-6


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("platform", "kernels"), [("cuda", 4), ("cpu", 0), ("rocm", 0)])
def test_a_program_runs_the_kernel_on_nvidia_gpus_alone(platform, kernels):
    """As it is lowered, which needs no compiler. JAX 0.12 asks the device which instructions a kernel may use."""
    function, arrays = of_arrays("pallas", "mixed_bfloat16")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(jax.grad(function)).trace(arrays).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton(") == kernels


def test_evaluation_has_neither_the_kernel_nor_its_call():
    function, arrays = of_arrays("pallas", "mixed_bfloat16")
    primitives = {eqn.primitive.name for body in bodies(jax.make_jaxpr(function)(arrays)) for eqn in body.eqns}
    assert {"kernel_call", "pallas_call"}.isdisjoint(primitives)


def test_gpt2_has_the_kernel_in_each_of_its_blocks():
    model = GPT2(vocabulary=11, length=6, width=16, depth=1, heads=2, norm_kernel="pallas", rngs=nnx.Rngs(0))
    graph, arrays = nnx.split(model)
    tokens = jnp.zeros((2, 6), jnp.int32)
    assert calls(lambda arrays: jnp.sum(nnx.merge(graph, arrays)(tokens)), arrays)["kernel_call"] == 2


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(mpjax.UsageError, match="unknown kernel of norms 'triton': wanted 'xla' or 'pallas'"):
        vit("triton", "float32")


def test_without_the_kernel_pallas_is_not_imported():
    code = "import sys, mpjax.models.vit; print('mpjax.models.layer_norm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
