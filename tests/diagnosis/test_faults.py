"""Planted faults: each found, located and named with its cause; what is proposed repairs it, and no part of it does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose
from mpjax.models import MLP


def _scaled(variable, factor):
    variable[...] = variable[...] * factor


def _check_repair(networks, model, loss_fn, batch, diagnosis, policy, scale=1.0):
    """The real step under the rules is finite and near float32's; under none but all of them."""
    wanted = networks.real_step(model, loss_fn, batch, None, scale)

    def repaired(rules) -> bool:
        text = ";".join([policy, *(f"{path}=float32" for path in rules)])
        real = [np.asarray(x, np.float64) for x in networks.real_step(model, loss_fn, batch, text, scale)]
        if not all(np.isfinite(x).all() for x in real) or abs(real[0] / float(wanted[0]) - 1) > 0.05:
            return False
        error = sum(np.sum((x - np.asarray(w, np.float64)) ** 2) for x, w in zip(real[1:], wanted[1:], strict=True))
        return bool(np.sqrt(error / sum(np.sum(np.asarray(w, np.float64) ** 2) for w in wanted[1:])) < 0.5)

    rules = list(diagnosis.rules)
    assert diagnosis.verified
    assert rules
    assert repaired(rules)
    for left_out in rules:
        assert not repaired([path for path in rules if path != left_out])


def _found(diagnosis) -> tuple:
    return diagnosis.verdict, diagnosis.path, diagnosis.direction


@pytest.mark.slow
def test_one_layer_of_twenty_passes_65504_forward(networks):
    model = MLP(16, 16, 20, 4, rngs=nnx.Rngs(0))
    batch = networks.make("mlp")[2]
    _scaled(model.layers[10].kernel, 1e6)
    _scaled(model.layers[11].kernel, 1e-6)
    diagnosis = diagnose(model, networks.labels_loss, batch, policy="mixed_float16", loss_scale=1024.0)
    assert _found(diagnosis) == ("overflow", "layers/10", "forward")
    assert set(diagnosis.rules) == {"layers/10", "layers/11"}
    assert "overflow in float16" in diagnosis.evidence
    assert "/mlp.py:" in str(diagnosis.source)
    _check_repair(networks, model, networks.labels_loss, batch, diagnosis, "mixed_float16", 1024.0)


@pytest.mark.slow
def test_a_parameter_too_large_for_the_dtype_it_is_stored_in(networks):
    model, loss_fn, batch = networks.make("mlp")
    _scaled(model.layers[1].kernel, 1e6)
    _scaled(model.layers[2].kernel, 1e-6)
    diagnosis = diagnose(model, loss_fn, batch, policy="float16", loss_scale=1024.0)
    assert _found(diagnosis) == ("overflow", "layers/1", "forward")
    assert diagnosis.operation == "parameter"
    _check_repair(networks, model, loss_fn, batch, diagnosis, "float16", 1024.0)


@pytest.mark.slow
def test_gradients_too_small_without_scaling(networks):
    model, _, batch = networks.make("mlp")

    def loss_fn(model, batch):
        return networks.labels_loss(model, batch) * 1e-6

    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16")
    assert (diagnosis.verdict, diagnosis.direction) == ("underflow", "backward")
    assert diagnosis.better_scale is not None
    assert diagnosis.better_scale >= 16
    assert diagnosis.rules == {}
    healthy = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=diagnosis.better_scale)
    assert healthy.verdict == "healthy"
    below_one = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=2.0**-8)
    assert below_one.better_scale is not None
    assert below_one.better_scale >= 16


@pytest.mark.slow
def test_two_layers_of_which_one_is_too_large_and_one_too_small(networks):
    model, loss_fn, batch = networks.make("mlp")
    _scaled(model.layers[1].kernel, 1e8)
    _scaled(model.layers[2].kernel, 1e-8)
    _scaled(model.layers[0].kernel, 1e-5)
    _scaled(model.layers[0].bias, 1e-5)
    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=256.0)
    assert _found(diagnosis) == ("overflow", "layers/1", "forward")
    assert set(diagnosis.rules) == {"layers/1", "layers/2"}
    _check_repair(networks, model, loss_fn, batch, diagnosis, "mixed_float16", 256.0)


class TwoHeads(nnx.Module):
    """A layer and two heads of it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.body = nnx.Linear(16, 16, rngs=rngs)
        self.main = nnx.Linear(16, 4, rngs=rngs)
        self.aux = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.body(x)
        return self.main(x), self.aux(x)


@pytest.mark.slow
def test_underflow_backward_in_a_head_that_no_loss_scale_saves(networks):
    model, batch = TwoHeads(rngs=nnx.Rngs(0)), networks.make("mlp")[2]

    def loss_fn(model, batch):
        main, aux = (
            optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()
            for logits in model(batch["x"])
        )
        return main + 1e-14 * aux

    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=1024.0)
    assert (diagnosis.verdict, diagnosis.direction) == ("underflow", "backward")
    assert diagnosis.better_scale is None
    assert diagnosis.flushed["aux/kernel"] == 1.0
    assert diagnosis.flushed["main/kernel"] == 0.0
    assert diagnosis.rules == {"aux": "float32"}
    assert "100.0% of the gradient values of aux/" in diagnosis.evidence
    _check_underflow_repaired(networks, model, loss_fn, batch)


def _check_underflow_repaired(networks, model, loss_fn, batch):
    """The real step loses the head's gradient, and under the rule does not."""

    def largest(policy):
        _, aux_bias, aux_kernel, *_ = networks.real_step(model, loss_fn, batch, policy, 1024.0)
        return float(jnp.max(jnp.abs(aux_bias))), float(jnp.max(jnp.abs(aux_kernel)))

    assert largest("mixed_float16") == (0.0, 0.0)
    assert min(largest("mixed_float16;aux=float32")) > 0


class Integral(nnx.Module):
    """The running sum along the last axis, one after another, in the dtype of its input, and a linear layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.before = nnx.Linear(1, 1, kernel_init=nnx.initializers.ones_init(), rngs=rngs)
        self.sum = RunningSum()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.sum(self.before(x[..., None])[..., 0])


class RunningSum(nnx.Module):
    """One after another, in its dtype."""

    def __init__(self):
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        def add(total, value):
            return total + value, None

        return jax.lax.scan(add, jnp.zeros(x.shape[0], self.dtype), x.T.astype(self.dtype))[0]


def _square_loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]).astype(jnp.float32)))


@pytest.mark.parametrize(
    ("policy", "terms", "stops"),
    # 256 + 1 is 256 in bfloat16, and 2048 + 1 is 2048 in float16; here in units of 2^-10.
    [("mixed_bfloat16", 1024, 0.25), pytest.param("mixed_float16", 4096, 2.0, marks=pytest.mark.slow)],
)
def test_rounding_in_a_long_running_sum(networks, policy, terms, stops):
    model, batch = Integral(rngs=nnx.Rngs(0)), {"x": jnp.full((2, terms), 2.0**-10)}
    diagnosis = diagnose(model, _square_loss, batch, policy=policy)
    assert _found(diagnosis) == ("rounding", "sum", "forward")
    assert diagnosis.operation == "add"
    assert diagnosis.rules == {"sum": "float32"}
    exact = (terms / 1024) ** 2
    assert diagnosis.loss == (stops**2, exact)
    assert diagnosis.verified
    real = networks.real_step(model, _square_loss, batch, f"{policy};sum=float32")
    assert float(real[0]) == pytest.approx(exact, rel=0.01)


class Difference(nnx.Module):
    """The small difference of large numbers: a mean taken off a value near to it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Linear(4, 4, rngs=rngs)
        self.scale.kernel[...] = jnp.eye(4)
        assert self.scale.bias is not None
        self.scale.bias[...] = jnp.full(4, 4096.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale(x) - jnp.asarray(4096.0, self.scale.dtype)


@pytest.mark.slow
def test_rounding_where_large_numbers_cancel(networks):
    model, batch = Difference(rngs=nnx.Rngs(0)), {"x": jnp.array([[0.3, 1.4, -0.7, 0.6]])}
    diagnosis = diagnose(model, _square_loss, batch, policy="p=f32,c=f16,o=f16")
    assert diagnosis.verdict == "rounding"
    assert set(diagnosis.rules) == {"scale"}


@pytest.mark.slow
def test_an_attention_logit_overflows(networks):
    model, loss_fn, batch = networks.make("transformer")
    attention = model.blocks[1].attention
    _scaled(attention.query.kernel, 1e5)
    _scaled(attention.key.kernel, 1e-4)
    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=1024.0)
    assert diagnosis.verdict == "overflow"
    assert str(diagnosis.path).startswith("blocks/1/attention")
    assert diagnosis.direction == "forward"
    _check_repair(networks, model, loss_fn, batch, diagnosis, "mixed_float16", 1024.0)


@pytest.mark.slow
def test_a_residual_network_overflows(networks):
    model, loss_fn, batch = networks.make("resnet")
    _scaled(model.blocks[1].conv2.kernel, 1e7)  # which batch norm takes back
    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=1024.0)
    assert _found(diagnosis) == ("overflow", "blocks/1/conv2", "forward")
    assert "blocks/1/conv2" in diagnosis.rules


@pytest.mark.parametrize("kind", [pytest.param("too large", marks=pytest.mark.slow), "infinite"])
def test_not_precision(networks, kind):
    model, loss_fn, batch = networks.make("mlp")
    if kind == "infinite":
        batch["x"] = batch["x"].at[0, 0].set(jnp.inf)
    else:
        for layer in model.layers:
            _scaled(layer.kernel, 1e20)
    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16")
    assert diagnosis.verdict == "not_precision"
    assert diagnosis.path == (None if kind == "infinite" else "layers/1")
    assert diagnosis.rules == {}
    assert diagnosis.evidence.startswith("The step is not finite in float32 either: ")
    assert "<h1>The step is not finite in float32 either" in diagnosis.to_html()


@pytest.mark.slow
def test_a_learning_rate_too_high_is_not_precision(networks):
    model, loss_fn, batch = networks.make("mlp")
    optimizer = nnx.Optimizer(model, optax.sgd(1e9), wrt=nnx.Param)
    for _ in range(8):
        optimizer.update(model, nnx.grad(lambda model: loss_fn(model, batch))(model))
    assert diagnose(model, loss_fn, batch, policy="mixed_float16").verdict == "not_precision"


@pytest.mark.slow
def test_division_by_what_became_zero(networks):
    model, _, batch = networks.make("mlp")

    def loss_fn(model, batch):
        logits = model.head(nnx.relu(model.layers[0](batch["x"])))
        small = jnp.square(logits * 1e-5)
        return jnp.mean((small / jnp.max(small)).astype(jnp.float32))

    policy = "p=f32,c=f16,o=f16"
    diagnosis = diagnose(model, loss_fn, batch, policy=policy, loss_scale=16.0)
    assert (diagnosis.verdict, diagnosis.direction) == ("underflow", "forward")
    assert diagnosis.path == ""
    _check_repair(networks, model, loss_fn, batch, diagnosis, policy, 16.0)


class Softmax(nnx.Module):
    """Probabilities of a linear layer's logits, in its dtype."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.softmax(self.linear(x).astype(self.linear.dtype) * 10)


@pytest.mark.slow
def test_logarithm_of_a_probability_that_became_zero(networks):
    model, batch = Softmax(rngs=nnx.Rngs(0)), networks.make("mlp")[2]

    def loss_fn(model, batch):
        chosen = jnp.take_along_axis(model(batch["x"]), batch["y"][:, None], axis=1)
        return -jnp.mean(jnp.log(chosen).astype(jnp.float32))

    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16")
    assert _found(diagnosis) == ("underflow", "", "forward")
    assert diagnosis.rules == {"linear": "float32"}
    assert "log" in diagnosis.evidence


@pytest.mark.slow
def test_a_dice_loss_in_half_precision_overflows_over_many_pixels(networks):
    model, batch = networks.UNet(4, rngs=nnx.Rngs(0)), networks.make("unet")[2]
    x = jnp.tile(batch["x"], (1, 32, 32, 1))
    batch = {"x": x, "y": (x[..., 0] > 0.5).astype(jnp.float32)}

    def dice(model, batch):
        p = nnx.sigmoid(model(batch["x"])).astype(jnp.float16 if model.out.dtype == jnp.float16 else jnp.float32)
        y = batch["y"].astype(p.dtype)
        overlap = jax.lax.reduce_sum_p.bind(p * y, axes=(0, 1, 2), out_sharding=None)
        total = jax.lax.reduce_sum_p.bind(p + y, axes=(0, 1, 2), out_sharding=None)
        return (1 - 2 * overlap / total).astype(jnp.float32)

    diagnosis = diagnose(model, dice, batch, policy="mixed_float16", loss_scale=1024.0)
    assert _found(diagnosis) == ("overflow", "", "forward")
    assert diagnosis.operation == "reduce_sum"
    assert diagnosis.rules == {"out": "float32"}


@pytest.mark.slow
def test_a_loss_scale_too_high(networks):
    model, loss_fn, batch = networks.make("unet")
    diagnosis = diagnose(model, loss_fn, batch, policy="mixed_float16", loss_scale=2.0**24)
    assert (diagnosis.verdict, diagnosis.direction) == ("loss_scale", "backward")
    assert diagnosis.better_scale is not None
    assert diagnosis.better_scale < 2.0**24
    assert diagnose(model, loss_fn, batch, loss_scale=diagnosis.better_scale).verdict == "healthy"


def test_gradients_of_1e_8_without_scaling_are_reported_with_their_share():
    class Weights(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(1000, jnp.float32))
            self.dtype = jnp.float32

        def __call__(self, x):
            return self.weight[...].astype(self.dtype) * x.astype(self.dtype)

    # A quarter of the gradient is 1e-6, the rest 1e-8, of which float16 has none.
    small = jnp.where(jnp.arange(1000) % 4 == 0, 1e-6, 1e-8)

    def loss_fn(model, batch):
        return jnp.sum(model(batch).astype(jnp.float32) * small)

    ones = jnp.ones(1000)
    unscaled = diagnose(Weights(), loss_fn, ones, policy="mixed_float16")
    assert unscaled.flushed == {"weight": 0.75}
    every = diagnose(Weights(), lambda model, x: jnp.sum(model(x).astype(jnp.float32)) * 1e-8, ones)
    assert (every.verdict, every.flushed) == ("underflow", {"weight": 1.0})
    assert "100.0% of the gradient values of weight" in every.evidence
    scaled = diagnose(Weights(), loss_fn, ones, policy="mixed_float16", loss_scale=2.0**15)
    assert scaled.verdict == "healthy"
    assert scaled.flushed["weight"] < 0.01


HEALTHY = [
    (family, policy, steps)
    for family in ("mlp", "resnet", "transformer", "unet")
    for policy, steps in (("mixed_float16", 10), ("mixed_bfloat16", 0))
]


@pytest.mark.parametrize(
    ("family", "policy", "steps"),
    [pytest.param(*case, marks=[] if case[:2] == ("mlp", "mixed_float16") else [pytest.mark.slow]) for case in HEALTHY],
)
def test_no_false_alarms(networks, family, policy, steps):
    model, loss_fn, batch = networks.make(family)
    if steps:
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step = nnx.jit(lambda model, o: o.update(model, nnx.grad(lambda model: loss_fn(model, batch))(model)))
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam promotes
            for _ in range(steps):
                step(model, optimizer)
    scale = 2.0**12 if policy == "mixed_float16" else 1.0
    diagnosis = diagnose(model, loss_fn, batch, policy=policy, loss_scale=scale)
    assert diagnosis.verdict == "healthy", diagnosis.evidence
    assert diagnosis.path is None
    assert diagnosis.rules == {}
