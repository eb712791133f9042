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
from mpjax.plan import GPUS, compiled_for, mesh_of, receipt_of, target_of_gpu


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
PARAMS = {"up": jax.ShapeDtypeStruct((32, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}


def step(params, x, half=jnp.bfloat16):
    """One step of gradient descent with half-precision products."""

    def loss(params):
        with jax.named_scope("up"):
            h = jnp.tanh(x.astype(half) @ params["up"].astype(half))
        with jax.named_scope("down"):
            return jnp.mean(jnp.square((h @ params["down"].astype(half)).astype(jnp.float32)))

    return jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, params, jax.grad(loss)(params))


# Products of bfloat16 are computed as such by some versions of XLA on a CPU; those of float16 by none so far.
step_in_float16 = functools.partial(step, half=jnp.float16)


def found(receipt, *kinds):
    return {(row.path, row.direction, row.operands, row.verdict) for row in receipt if row.kind in kinds}


def test_a_cpu_says_that_it_widens_half_precision_and_updates_are_float32():
    receipt = mpjax.receipt(step_in_float16, PARAMS, X, policy="mixed_float16")
    assert receipt.line == "float16 asked; this CPU computes 5 of 5 products in float32 (wider)"
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


def test_an_optimizer_whose_name_begins_with_the_model_s_is_no_part_of_it():
    model = nnx.Linear(32, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(net, x):
        gradients = nnx.grad(lambda model: jnp.mean(jnp.square(model(x))))(net["model"])
        net["model_optimizer"].update(net["model"], gradients)

    with jax.numpy_dtype_promotion("standard"):
        receipt = mpjax.receipt(step, {"model": model, "model_optimizer": optimizer}, X, policy="float32")
    assert found(receipt, "update") == {
        (f"args/0/model/{name}", "update", "float32", "as asked") for name in ("kernel", "bias")
    }


def test_an_array_that_a_function_takes_and_returns_is_no_parameter():
    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert [row.kind for row in mpjax.receipt(jnp.dot, square, square)] == ["product"]


def test_stages_of_jit_are_taken_as_they_are():
    traced = jax.jit(step_in_float16).trace(PARAMS, X)
    assert mpjax.receipt(traced).line.startswith("float16 asked; this CPU computes 5 of 5")
    compiled = traced.lower().compile()
    assert mpjax.receipt(compiled, policy="mixed_float16").line.startswith("float16 asked; this CPU computes 5 of 5")
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


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float16")])
def test_operands_of_two_dtypes_are_multiplied_in_the_one_that_holds_both_as_asked(dtypes):
    """No device has such a product, and widening changes no value: the receipt says so, and `require` agrees."""
    x, w = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in dtypes)

    def fn(x, w):
        return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    receipt = mpjax.receipt(fn, x, w)
    (row,) = receipt
    assert (set(row.asked.split(" x ")), row.operands, row.verdict) == ({*dtypes}, "float32", "as asked")
    assert row.note == "XLA widens operands to float32"
    receipt.require()


ROUNDINGS = {
    "cast": lambda g: g.astype(jnp.bfloat16),
    "cast and scaled": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32) * 0.5,
    "reduce_precision": lambda g: jax.lax.reduce_precision(g, exponent_bits=8, mantissa_bits=7),
    "cast and reshaped": lambda g: jnp.pad(g.astype(jnp.bfloat16).reshape(-1), (0, 2)),
    "in a call": jax.jit(lambda g: g.astype(jnp.bfloat16)),
}


def averaged(before):
    def of_device(w, x):
        gradient = before(jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)).astype(jnp.float32)
        return jax.lax.pmean(gradient, "data")

    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    return jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


@pytest.mark.parametrize("before", ROUNDINGS.values(), ids=ROUNDINGS)
@pytest.mark.parametrize("policy", [None, "float32", "mixed_float16"])
def test_a_gradient_that_is_rounded_before_a_float32_sum_over_devices_is_narrower(policy, before):
    receipt = mpjax.receipt(averaged(before), jnp.ones((4, 3)), jnp.ones((4, 4)), policy=policy)
    (row,) = [row for row in receipt if row.kind == "reduction" and row.by == "cast"]
    assert (row.asked, row.operands, row.verdict) == ("float32", "bfloat16", "narrower")
    assert "the function itself rounds to bfloat16 what it then adds over devices in float32" in row.reason


@pytest.mark.parametrize(
    ("before", "policy"),
    [
        (lambda g: g, "float32"),
        (lambda g: g * 2.0, None),
        (lambda g: jnp.square(g.astype(jnp.bfloat16)).astype(jnp.float32), None),  # computed in it
        (ROUNDINGS["cast"], "mixed_bfloat16"),  # which rounds gradients itself
    ],
    ids=["plain", "scaled", "computed in bfloat16", "as its policy does"],
)
def test_a_gradient_that_is_not_rounded_further_is_as_asked(before, policy):
    receipt = mpjax.receipt(averaged(before), jnp.ones((4, 3)), jnp.ones((4, 4)), policy=policy)
    assert [row for row in receipt if row.by == "cast"] == []
    assert {row.verdict for row in receipt if row.kind == "reduction"} == {"as asked"}


def test_gradients_that_the_compiler_adds_in_bfloat16_on_gpus_are_narrower(plugin):
    """XLA joins both in one array and keeps no name of it."""
    mesh = mesh_of("h200", 2)
    place = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=place), PARAMS)
    traced = jax.jit(step).trace(params, x)
    executable = compiled_for(traced.lower(), "h200")
    policy = mpjax.get_policy("mixed_bfloat16")
    receipt = receipt_of(executable, traced.jaxpr, policy, target=target_of_gpu(GPUS["h200"]))
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


def through(x):
    """Rounds float32 numbers to bfloat16 and casts them back."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


SQUARE = jax.ShapeDtypeStruct((32, 32), jnp.float32)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), "computes it in bfloat16"),
        (lambda x, w: through(x) @ w, "rounds an operand to bfloat16"),
        (lambda x, w: jnp.where(x > 0, through(x), x) @ w, "rounds an operand to bfloat16"),
        (lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.bfloat16), "rounds the result to bfloat16"),
    ],
    ids=["operands", "operands widened again", "some of an operand", "result"],
)
def test_bits_that_the_function_itself_drops_are_narrower_also_on_a_cpu_that_computes_in_float32(fn, reason):
    with jax.numpy_dtype_promotion("standard"):
        receipt = mpjax.receipt(fn, X, SQUARE, policy="float32")
    (row,) = receipt
    assert (row.verdict, row.reason) == ("narrower", f"the function itself {reason}")
    with pytest.raises(DtypeError, match=reason):
        receipt.require(device_limits=False)


def test_activations_that_a_policy_rounds_between_modules_are_as_asked():
    """A norm computes in float32 and returns bfloat16; the head that follows multiplies in float32."""
    model = nnx.Sequential(nnx.LayerNorm(32, rngs=nnx.Rngs(0)), nnx.Linear(32, 8, rngs=nnx.Rngs(0)))
    policy = "mixed_bfloat16;layers/1=float32"
    mpjax.apply_policy(model, policy)
    assert mpjax.receipt(model, X, policy=policy).line == "float32 as asked in 1 of 1 products"


UPDATES = {
    "exact": (lambda p, g: p - jnp.float32(0.1) * g, "as asked"),
    "rounded": (lambda p, g: through(p - jnp.float32(0.1) * g), "narrower"),
    "rounded if finite": (lambda p, g: jnp.where(jnp.isfinite(g), through(p - g), p), "narrower"),
    "by its bits": (lambda p, g: jax.lax.reduce_precision(p - g, 8, 7), "narrower"),
    "computed in bfloat16": (
        lambda p, g: (p.astype(jnp.bfloat16) - g.astype(jnp.bfloat16)).astype(jnp.float32),
        "narrower",
    ),
}


def step_with(update, *, steps=0):
    """Returns a function that updates parameters; with `steps`, in a loop of as many."""

    def one(params, x):
        gradients = jax.grad(lambda params: jnp.mean(jnp.square(x @ params["w"])))(params)
        return jax.tree.map(update, params, gradients)

    def several(params, x):
        return jax.lax.scan(lambda params, _: (one(params, x), None), params, length=steps)[0]

    return several if steps else one


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_float32_parameter_that_is_rounded_on_its_way_is_not_as_asked(name, steps):
    update, verdict = UPDATES[name]
    receipt = mpjax.receipt(step_with(update, steps=steps), {"w": SQUARE}, X, policy="float32")
    assert {row.verdict for row in receipt if row.kind == "update"} == {verdict}


def test_a_parameter_that_comes_back_in_fewer_bits_is_not_as_asked():
    def in_half(p, g):
        return (p - jnp.float32(0.1) * g).astype(jnp.bfloat16)

    receipt = mpjax.receipt(step_with(in_half), {"w": SQUARE}, X, policy="float32")
    (row,) = (row for row in receipt if row.kind == "update")
    assert (row.verdict, row.reason) == ("narrower", "the function itself rounds the new parameter to bfloat16")


@pytest.mark.parametrize("name", ["exact", "rounded", "rounded if finite"])
def test_a_compiled_program_shows_such_a_cast_without_its_trace(name):
    update, verdict = UPDATES[name]
    compiled = jax.jit(step_with(update)).lower({"w": SQUARE}, X).compile()
    assert {row.verdict for row in mpjax.receipt(compiled, policy="float32") if row.kind == "update"} == {verdict}


@pytest.mark.parametrize("name", UPDATES)
def test_such_casts_are_seen_on_a_gpu(plugin, name):
    update, verdict = UPDATES[name]
    receipt = mpjax.receipt(step_with(update), {"w": SQUARE}, X, policy="float32", device="h200")
    assert {row.verdict for row in receipt if row.kind == "update"} == {verdict}


@pytest.mark.parametrize(
    "wrap",
    [mpjax.precision.stochastic_weights, mpjax.precision.compensated_weights, mpjax.precision.master_weights],
)
def test_parameters_that_are_stored_in_bfloat16_are_rounded_to_it_as_asked(wrap):
    tx = wrap(optax.sgd(0.1))
    params = {"w": jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, x):
        gradients = jax.grad(lambda params: jnp.mean(jnp.square(x @ params["w"])).astype(jnp.float32))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        receipt = mpjax.receipt(step, params, state, x, policy="bfloat16")
    assert found(receipt, "update") == {("w", "update", "float32", "as asked")}


class Blocks(nnx.Module):
    """Three layers, of which one is to be in float8."""

    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


WIDE = jax.ShapeDtypeStruct((128, 64), jnp.float32)


def blocks(policy):
    model = Blocks()
    mpjax.apply_policy(model, policy)
    return model


def split(model):
    """Returns a function of the state of a model, and the state."""
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state


def test_float8_that_was_forgotten_is_missing_also_if_the_module_is_not_known():
    fn, state = split(blocks("mixed_bfloat16"))
    for receipt in (
        mpjax.receipt(fn, state, WIDE, policy="mixed_float8"),
        mpjax.receipt(jax.jit(fn).trace(state, WIDE), policy="mixed_float8"),
    ):
        assert receipt.line.endswith("; float8 asked, missing in all products")
        with pytest.raises(DtypeError, match="the policy asks for products by float8, and the function has none"):
            receipt.require(device_limits=False)
    compiled = jax.jit(fn).lower(state, WIDE).compile()
    assert mpjax.receipt(compiled, policy="mixed_float8").line.endswith("float8 asked, unknown in all products")
    with pytest.raises(DtypeError, match="none in float8"):
        mpjax.receipt(jnp.tanh, WIDE, policy="mixed_float8").require()


def test_float8_that_nobody_asked_for_is_narrower_with_and_without_the_module():
    model = blocks("mixed_float8")
    fn, state = split(model)
    for receipt in (
        mpjax.receipt(model, WIDE, policy="mixed_bfloat16"),
        mpjax.receipt(fn, state, WIDE, policy="mixed_bfloat16"),
    ):
        (row,) = (row for row in receipt if row.verdict == "narrower")
        assert row.reason == "the function itself computes it in float8_e4m3fn"


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        ("mixed_float8", "mixed_float8_delayed"),
        ("mixed_mxfp8", "mixed_float8_rowwise"),
        pytest.param("mixed_float8_rowwise", "mixed_float8", marks=pytest.mark.slow),
        pytest.param("mixed_float8_delayed", "mixed_mxfp8", marks=pytest.mark.slow),
    ],
)
def test_the_recipe_asked_for_is_as_asked_and_another_one_is_not(policy, other):
    def gradients(model, x):
        return nnx.grad(lambda model: jnp.mean(jnp.square(model(x))))(model)

    model = blocks(policy)
    for asked in (policy, other):
        receipt = mpjax.receipt(gradients, model, WIDE, policy=asked)
        wrong = {row.path for row in receipt if row.verdict != "as asked" and not row.device_limit}
        assert wrong == (set() if asked == policy else {"blocks/1"})


@pytest.mark.parametrize(("policy", "other"), [("mixed_float8", "mixed_mxfp8"), ("mixed_mxfp8", "mixed_float8")])
def test_blocks_are_told_from_other_scales_also_if_the_module_is_not_known(policy, other):
    fn, state = split(blocks(policy))
    mpjax.receipt(fn, state, WIDE, policy=policy).require(device_limits=False)
    with pytest.raises(DtypeError, match=r"scale for each block, and the policy asks for"):
        mpjax.receipt(fn, state, WIDE, policy=other).require(device_limits=False)


@pytest.mark.parametrize("policy", ["mixed_float8", "mixed_float8_rowwise", "mixed_float8_delayed"])
def test_float8_of_a_plain_step_is_as_asked_on_an_h200_histories_included(plugin, policy):
    def step(model, x):
        gradients = nnx.grad(lambda model: jnp.mean(jnp.square(model(x))))(model)
        for block, gradient in zip(model.blocks, gradients["blocks"].values(), strict=True):
            block.kernel[...] = block.kernel[...] - jnp.float32(0.1) * gradient["kernel"][...]

    receipt = mpjax.receipt(step, blocks(policy), WIDE, policy=policy, device="h200")
    receipt.require()
    updates = {row.path for row in receipt if row.kind == "update"}
    assert updates == {f"args/0/blocks/{number}/kernel" for number in range(3)}


def test_a_rule_that_decides_nothing_is_an_error():
    model = blocks("mixed_bfloat16")
    fn, state = split(model)
    with pytest.raises(UsageError, match="rule 'nosuch' matches nothing; nearest: blocks"):
        mpjax.receipt(model, WIDE, policy="mixed_bfloat16;nosuch=float32")
    with pytest.raises(UsageError, match="rule 'nosuch' matches nothing"):
        mpjax.receipt(fn, state, WIDE, policy="mixed_bfloat16;nosuch=float32")
    with pytest.raises(UsageError, match="rule 'type:Linear' names a class, and no Flax NNX module is known here"):
        mpjax.receipt(jax.jit(fn).lower(state, WIDE), policy="mixed_bfloat16;type:Linear=float32")
    mpjax.receipt(step, PARAMS, X, policy="mixed_bfloat16;up=bfloat16")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (2, "params=2: wanted the index of one of 2 arguments, 0 to 1"),
        (-1, "params=-1: wanted"),
        ("up", "params='up': wanted the index of an argument, such as 0"),
        (True, "params=True: wanted the index"),
    ],
)
def test_params_that_are_no_index_of_an_argument_are_an_error(params, says):
    with pytest.raises(UsageError, match=says):
        mpjax.receipt(step, PARAMS, X, params=params)
    with pytest.raises(UsageError, match=says):
        mpjax.receipt(jax.jit(step).lower(PARAMS, X).compile(), params=params)


def test_a_step_whose_parameters_are_not_the_first_argument_says_so():
    def other(x, params):
        return step(params, x)

    receipt = mpjax.receipt(other, X, PARAMS, policy="mixed_bfloat16")
    assert receipt.notes == (
        "no update was looked at: argument 0 has no array that comes back changed; argument 1 comes back: write "
        "params=1 if it has the parameters",
    )
    receipt.require(device_limits=False)
    receipt = mpjax.receipt(other, X, PARAMS, policy="mixed_bfloat16", params=1)
    assert receipt.notes == ()
    assert {row.path for row in receipt if row.kind == "update"} == {"up", "down"}


def test_parameters_beside_a_model_are_an_error_and_an_index_of_a_model_is_none():
    model = Net(nnx.Rngs(0))
    with pytest.raises(UsageError, match="params=1 has no Flax NNX module, and other arguments have"):
        mpjax.receipt(lambda model, x: model(x), model, X, params=1)
    assert mpjax.receipt(lambda x, model: model(x), X, model, params=1)


def test_a_compiled_product_of_equal_shapes_is_no_update_and_a_compiled_step_is_one():
    product = jax.jit(jnp.dot).lower(SQUARE, SQUARE).compile()
    assert mpjax.receipt(product, policy="float32").line == "float32 as asked in 1 of 1 products"
    assert mpjax.receipt(product, policy="float32")

    def one(w, x):
        return w - jnp.float32(0.1) * jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)

    compiled = jax.jit(one).lower(SQUARE, X).compile()
    assert [row.verdict for row in mpjax.receipt(compiled, policy="float32") if row.kind == "update"] == ["as asked"]


@pytest.mark.parametrize("device", [3, 2.5, "", ["h200"]])
def test_a_device_that_is_neither_a_device_nor_a_name_is_an_error(device):
    with pytest.raises(UsageError, match='wanted a jax.Device, or a name such as "cpu" or "h200"'):
        mpjax.receipt(jnp.sin, jnp.float32(1), device=device)


def test_the_name_of_a_gpu_in_capitals_is_an_error_that_says_what_is_meant():
    with pytest.raises(UsageError, match="did you mean h200"):
        mpjax.receipt(jnp.sin, jnp.float32(1), device="H200")
