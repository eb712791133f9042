"""What functions run in, here and on a GPU that is not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.errors import DtypeError, UsageError
from mpjax.plan.compiled import compiled_for
from mpjax.plan.devices import GPUS
from mpjax.plan.receipt_of_program import receipt_of
from mpjax.plan.target import mesh_of, target_of_gpu


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
PARAMS = {"up": jax.ShapeDtypeStruct((32, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}


def step(params, x):
    """One step of gradient descent with half-precision products."""

    def loss(params):
        with jax.named_scope("up"):
            h = jnp.tanh(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16))
        with jax.named_scope("down"):
            return jnp.mean(jnp.square((h @ params["down"].astype(jnp.bfloat16)).astype(jnp.float32)))

    return jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, params, jax.grad(loss)(params))


def found(receipt, *kinds):
    return {(row.path, row.direction, row.operands, row.verdict) for row in receipt if row.kind in kinds}


def test_a_cpu_says_that_it_widens_half_precision_and_updates_are_float32():
    receipt = mpjax.receipt(step, PARAMS, X, policy="mixed_bfloat16")
    assert receipt.line == "bfloat16 asked; this CPU computes 5 of 5 products in float32 (wider)"
    assert all(row.device_limit for row in receipt if row.kind == "product")
    assert found(receipt, "update") == {(name, "update", "float32", "as asked") for name in ("up", "down")}
    receipt.require(device_limits=False)
    with pytest.raises(DtypeError, match="this CPU computes 5 of 5 products in float32"):
        receipt.require()


def test_without_a_policy_the_trace_says_what_was_asked_for():
    """The same products are compared with what the function casts to."""
    receipt = mpjax.receipt(step, PARAMS, X)
    assert {row.asked for row in receipt if row.kind == "product"} == {"bfloat16"}
    assert mpjax.receipt(jnp.dot, X, jax.ShapeDtypeStruct((32, 8), jnp.float32))


def test_a_product_that_the_function_itself_widens_is_named_with_its_module():
    def careless(w, x):
        with jax.named_scope("head"):
            return x @ w.astype(jnp.float32)

    receipt = mpjax.receipt(careless, jax.ShapeDtypeStruct((32, 8), jnp.float16), X, policy="mixed_float16")
    (row,) = (row for row in receipt if row.kind == "product")
    assert (row.path, row.verdict, row.device_limit) == ("head", "wider", False)
    assert row.reason == "the function itself computes it in float32"


def test_gradients_alone_are_no_updates():
    def gradients(params, x):
        return jax.grad(lambda params: jnp.sum(x @ params["up"]))(params)

    assert not [row for row in mpjax.receipt(gradients, PARAMS, X) if row.kind == "update"]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.first(x)))


def test_an_nnx_module_has_its_paths_and_rules_by_type_apply():
    model = Net(nnx.Rngs(0))
    policy = "params=float32,compute=float16,output=float32;head=float32"
    mpjax.apply_policy(model, policy)
    receipt = mpjax.receipt(model, X, policy=policy)
    assert {(row.path, row.asked, row.verdict) for row in receipt if row.kind == "product"} == {
        ("first", "float16", "wider"),
        ("head", "float32", "as asked"),
    }


def test_updates_of_an_nnx_model_that_a_step_changes_are_found():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        gradients = nnx.grad(lambda model: jnp.mean(jnp.square(model(x))))(model)
        optimizer.update(model, gradients)

    with jax.numpy_dtype_promotion("standard"):  # optax multiplies by Python numbers
        receipt = mpjax.receipt(step, model, optimizer, X, policy="float32")
    names = {f"args/0/{layer}/{name}" for layer in ("first", "head") for name in ("kernel", "bias")}
    assert found(receipt, "update") == {(name, "update", "float32", "as asked") for name in names}


def test_an_array_that_a_function_takes_and_returns_is_no_parameter():
    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert [row.kind for row in mpjax.receipt(jnp.dot, square, square)] == ["product"]


def test_stages_of_jit_are_taken_as_they_are():
    traced = jax.jit(step).trace(PARAMS, X)
    assert mpjax.receipt(traced).line.startswith("bfloat16 asked; this CPU computes 5 of 5")
    compiled = traced.lower().compile()
    assert mpjax.receipt(compiled, policy="mixed_bfloat16").line.startswith("bfloat16 asked; this CPU computes 5 of 5")
    assert {row.verdict for row in mpjax.receipt(compiled) if row.kind == "product"} == {"unknown"}


def test_sums_of_gradients_that_the_compiler_adds_are_compared_with_reduce_dtype():
    """A batch that is divided over devices without shard_map: gradients are added in the dtype of their product."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, P())), PARAMS)
    receipt = mpjax.receipt(jax.jit(step), params, x, policy="mixed_bfloat16")
    sums = [row for row in receipt if row.kind == "reduction"]
    assert {row.asked for row in sums if row.direction == "backward"} == {"float32"}
    assert {row.note for row in sums} == {"added by the compiler"}


def test_gradients_that_the_compiler_adds_in_bfloat16_on_gpus_are_narrower(plugin):
    """XLA joins both in one array and keeps no name of it."""
    mesh = mesh_of("h200", 2)
    place = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=place), PARAMS)
    traced = jax.jit(step).trace(params, x)
    executable = compiled_for(traced.lower(), "h200")
    policy = mpjax.get_policy("mixed_bfloat16")
    receipt = receipt_of(executable, traced.jaxpr, target_of_gpu(GPUS["h200"]), policy)
    assert found(receipt, "reduction") == {("", "backward", "bfloat16", "narrower")}


def test_what_cannot_be_compiled_is_an_error_that_says_what_is_wanted():
    with pytest.raises(UsageError, match="receipt takes a function, a Flax NNX module or a compiled program, got int"):
        mpjax.receipt(3)
    with pytest.raises(UsageError, match="receipt takes a Compiled alone"):
        mpjax.receipt(jax.jit(jnp.sin).lower(jnp.float32(1)).compile(), jnp.float32(1))
    with pytest.raises(UsageError, match="device 'h20': wanted .* v100, a100, .*; did you mean h200?"):
        mpjax.receipt(jnp.sin, jnp.float32(1), device="h20")


def quantised(cls, dtype=jnp.bfloat16):
    model = linen.Dense(256, dtype=dtype, dot_general_cls=cls)
    x = jax.ShapeDtypeStruct((128, 512), dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def gradients(variables, x):
        return jax.grad(lambda v: jnp.mean(jnp.square(jnp.float32(model.apply(v, x)))), allow_int=True)(variables)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Flax's own code needs both
        return mpjax.receipt(gradients, variables, x, device="h200")


@pytest.mark.filterwarnings("ignore")
def test_of_flaxs_quantise_dequantise_operations_no_float8_runs_on_an_h200(plugin):
    receipt = quantised(linen.Fp8DotGeneralOp)
    products = [row for row in receipt if row.kind == "product"]
    assert {(row.direction, row.asked) for row in products} == {
        ("forward", "float8_e4m3fn"),
        ("backward", "float8_e4m3fn x float8_e5m2"),
    }
    assert {(row.operands, row.verdict) for row in products} == {("bfloat16", "wider")}
    assert all("quantised to float8" in row.reason for row in products)


@pytest.mark.filterwarnings("ignore")
def test_of_flaxs_direct_operations_float8_does_run_on_an_h200(plugin):
    receipt = quantised(linen.Fp8DirectDotGeneralOp)
    products = [row for row in receipt if row.kind == "product"]
    assert {(row.operands, row.verdict) for row in products} == {
        ("float8_e4m3fn", "as asked"),
        ("float8_e4m3fn x float8_e5m2", "as asked"),
    }


def test_float32_products_of_an_h200_are_tensorfloat32_unless_they_ask_for_more(plugin):
    w = jax.ShapeDtypeStruct((32, 128), jnp.float32)
    x = jax.ShapeDtypeStruct((128, 32), jnp.float32)
    (row,) = mpjax.receipt(jnp.dot, x, w, policy="float32", device="h200")
    assert (row.operands, row.verdict) == ("tensorfloat32", "narrower")
    exact = functools.partial(jnp.dot, precision="highest")
    assert mpjax.receipt(exact, x, w, policy="float32", device="h200")


def test_a_device_may_be_named_by_its_platform_or_be_a_device():
    for device in ("cpu", jax.devices("cpu")[1]):
        assert mpjax.receipt(step, PARAMS, X, device=device).device == "this CPU"


def test_branches_and_loops_are_read_too():
    def branched(w, x):
        def one(x):
            return jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]

        return jax.lax.cond(x[0, 0] > jnp.float32(0), one, lambda x: jnp.tanh(x @ w), x)

    receipt = mpjax.receipt(branched, jax.ShapeDtypeStruct((32, 32), jnp.float32), X, policy="float32")
    assert receipt.line == "float32 as asked in 2 of 2 products"
    assert {row.note for row in receipt if row.kind == "product"} == {"", "in a loop, counted once"}
