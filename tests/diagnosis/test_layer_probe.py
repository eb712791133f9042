"""Statistics of layers in a compiled step, held against NumPy's float16 and against the real step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import EXPONENTS, probe, probe_function


def probed(loss_fn, params, batch=None, **options):
    """Path and direction to the layer."""
    layers = jax.jit(lambda params, batch: probe_function(loss_fn, params, batch, **options))(params, batch)
    return {(layer.path, layer.direction): layer for layer in layers.by_layer()}


@pytest.mark.parametrize(("policy", "dtype"), [("mixed_float16", jnp.float16), ("mixed_bfloat16", jnp.bfloat16)])
def test_a_layer_is_what_its_results_are(policy, dtype):
    x, kernel = (jax.random.normal(jax.random.key(i), (16, 16)) for i in (0, 1))

    def loss_fn(params, batch):
        with jax.named_scope("head"):
            x = batch @ params["kernel"]
        return jnp.sum(x)

    layers = probed(loss_fn, {"kernel": kernel}, x, policy=policy)
    half = x.astype(dtype) @ kernel.astype(dtype)
    read = np.abs(
        np.concatenate([np.asarray(a, np.float32).ravel() for a in (x.astype(dtype), kernel.astype(dtype), half)])
    )
    head = layers["head", "forward"]
    assert (head.dtype, head.largest) == (dtype, read.max())
    assert head.mean == pytest.approx(read.mean(), rel=1e-5)
    counts = {e: int(np.sum((read >= 2.0**e) & (read < 2.0 ** (e + 1)))) for e in EXPONENTS}
    assert head.counts == {e: count for e, count in counts.items() if count}
    assert (head.non_finite, head.overflow, head.underflow) == (0, 0, 0)


def test_what_rounding_makes_inf_zero_and_subnormal_is_counted():
    def loss_fn(params, batch):
        with jax.named_scope("one"):
            x = jnp.dot(batch, params)
        return jnp.sum(x)

    # 4 x 1 by 1 x 1: results 2^17, 2^-30, 2^-20 and 1 from operands that float16 has.
    batch = jnp.array([[2.0**10], [2.0**-15], [2.0**-12], [1.0]])
    params = jnp.array([[2.0**7]])
    one = probed(loss_fn, params, batch)["one", "forward"]
    assert one.overflow == one.non_finite == 1 / 9  # five operands, of which 2^-15 is subnormal, and four results
    small = probed(loss_fn, params * 2.0**-15, batch)["one", "forward"]
    # Products 2^2, 2^-23 (subnormal), 2^-20 (subnormal), 2^-8; operand 2^-15 is subnormal too.
    assert (small.overflow, small.underflow, small.subnormal) == (0, 0, 3 / 9)
    smaller = probed(loss_fn, params * 2.0**-20, batch)["one", "forward"]
    # Products 2^-3, 2^-28 (zero), 2^-25 (a tie, to zero), 2^-13.
    assert (smaller.underflow, smaller.subnormal) == (2 / 9, 1 / 9)


def test_gradients_of_1e8_are_flushed_without_scaling_and_not_with_it():
    def loss_fn(params, batch):
        with jax.named_scope("head"):
            x = batch @ params["kernel"]
        return jnp.mean(x) * 1e-6

    params, batch = {"kernel": jnp.ones((16, 16))}, jax.random.normal(jax.random.key(0), (16, 16))

    def flushed(scale):
        layers = probed(loss_fn, params, batch, loss_scale=scale)
        return max(layer.underflow for (_, direction), layer in layers.items() if direction == "backward")

    assert flushed(1.0) == 1.0
    assert flushed(2.0**24) < 0.01
    assert probed(loss_fn, params, batch, loss_scale=2.0**24)["kernel", "gradient"].largest < 1e-7


def test_turns_of_a_loop_are_read_together():
    def loss_fn(params, batch):
        def turn(x, _):
            with jax.named_scope("turn"):
                return jnp.dot(x, params), None

        return jnp.sum(jax.lax.scan(turn, batch, None, length=6)[0].astype(jnp.float32))

    # Each turn's result is the next one's operand; float16 has 2^-24 and not 2^-28.
    layer = probed(loss_fn, jnp.array([[2.0**-4]]), jnp.array([[2.0**-4]]))["turn", "forward"]
    counts = {exponent: count for exponent, count in layer.counts.items() if exponent not in (-4,)}
    assert counts == {-8: 2, -12: 2, -16: 2, -20: 2, -24: 2}
    assert layer.underflow == 1 / 13  # six results, six operands, and the weight


def test_a_loop_over_constants_is_part_of_the_compiled_step():
    def loss_fn(params, batch):
        x, ones = jax.lax.scan(lambda x, _: (x, 1.0), jnp.dot(batch, params), length=2)
        return jnp.sum(x) * ones[0]  # JAX takes x out of the loop, which then has no input

    layers = probed(loss_fn, jnp.full((1, 1), 0.25), jnp.full((1, 1), 2.0))
    assert next(x for (_, direction), x in layers.items() if direction == "gradient").largest == 2.0


@pytest.mark.slow
def test_float32_is_read_too_and_rounds_nothing(networks):
    layers = jax.jit(lambda: probe(*networks.make("mlp"), policy="float32"))().by_layer()
    assert {layer.dtype for layer in layers} == {np.dtype("float32")}
    assert {(layer.overflow, layer.underflow) for layer in layers} == {(0.0, 0.0)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["resnet", "transformer"])
def test_gradients_are_those_of_the_step(networks, family):
    model, loss_fn, batch = networks.make(family)
    policy = "mixed_float16"
    with jax.numpy_dtype_promotion("standard"):
        read = jax.jit(lambda batch: probe(model, loss_fn, batch, policy=policy, loss_scale=2.0**10))
        layers = read(batch).by_layer()
    read = {layer.path: layer.largest for layer in layers if layer.direction == "gradient"}
    real = networks.real_step(model, loss_fn, batch, policy, 2.0**10)[1:]
    assert len(read) == len(real)
    # Compiled, roundings differ in last bits, a relu may flip, and a gradient of which all cancels is noise.
    assert sorted(read.values()) == pytest.approx(
        sorted(float(jnp.max(jnp.abs(g))) / 2**10 for g in real), rel=0.1, abs=1e-4
    )
    assert {layer.direction for layer in layers} == {"forward", "backward", "gradient"}


@pytest.mark.slow
def test_nnx_modules_go_by_their_paths_linen_modules_by_theirs_and_the_rest_by_its_line(networks):
    nnx_paths = {layer.path for layer in probe(*networks.make("mlp")).by_layer() if layer.direction == "forward"}
    assert {"layers/0", "layers/1", "layers/2", "head"} <= nnx_paths

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="out")(nn.relu(nn.Dense(8)(x)))

    net, x = Net(), jnp.ones((2, 4))
    params = net.init(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.mean(net.apply(params, x) @ jnp.ones((4, 2)))

    paths = {path for path, direction in probed(loss_fn, params, x) if direction == "forward"}
    assert {"Net/Dense_0", "Net/out"} <= paths
    assert any(path.startswith("test_layer_probe.py:") for path in paths)


def test_what_only_moves_values_is_not_read_again():
    def loss_fn(params, batch):
        with jax.named_scope("inner"):
            x = jnp.transpose(jnp.dot(batch, params)).reshape(-1)
        with jax.named_scope("outer"):
            return jnp.sum(x * x)

    sites = jax.jit(lambda p, b: probe_function(loss_fn, p, b))(jnp.ones((4, 4)), jnp.ones((4, 4))).sites
    inner = [site.operation for site in sites if (site.path, site.direction) == ("inner", "forward")]
    assert inner == ["convert_element_type", "convert_element_type", "dot_general"]


def moved(x):
    zero = jnp.zeros(x.shape, x.dtype)
    with jax.named_scope("later"):
        return x + zero


def of_a_branch(x):
    return jax.lax.cond(x[0, 0] > 9, lambda x: (x, 1.0), lambda x: (x, 0.0), x)[0]


def of_a_call(x):
    return jax.jit(lambda x: (x, 1.0))(x)[0]


def of_a_loop(x):
    return jax.lax.scan(lambda x, _: (x, 1.0), x, length=2)[0]


@pytest.mark.parametrize(
    "through", [moved, of_a_call, *(pytest.param(f, marks=pytest.mark.slow) for f in (of_a_branch, of_a_loop))]
)
def test_literals_among_the_values_that_leave_are_not_read(through):
    def loss_fn(params, batch):
        with jax.named_scope("cell"):
            x = jnp.tanh(jnp.dot(batch, params))
        return jnp.sum(through(x))

    cell = probed(loss_fn, jnp.full((2, 2), 0.25), jnp.full((2, 2), 1.0))["cell", "forward"]
    assert cell.largest == 1.0
    assert {-2, -1, 0} <= set(cell.counts)  # of 0.25, tanh(0.5) and 1


@pytest.mark.slow
def test_the_model_is_left_as_it_is(networks):
    model, loss_fn, batch = networks.make("mlp")
    kind, kernel = type(model.head), model.head.kernel[...]
    probe(model, loss_fn, batch)
    assert type(model.head) is kind
    assert (model.head.kernel[...] == kernel).all()
