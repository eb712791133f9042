"""Faults that appear in the course of training, in a residual network, a Transformer and a U-Net, on real digits.

Each is planted in a run that trains well at first. The state before the first bad step, its batch and its loss scale
are diagnosed; with what the diagnosis prints the run goes on from there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import mpjax
from mpjax.models import BasicBlock, ResNet, SmallStem


# --- Runs


def static(scale: float) -> Callable:
    return functools.partial(mpjax.static_loss_scaling, scale=scale)


class State(NamedTuple):
    """Of a run: parameters, all else of the model, the optimizer's, and how many steps were attempted."""

    params: Any
    rest: Any
    opt_state: Any
    number: int

    @property
    def scale(self) -> float:
        return float(mpjax.loss_scale_state(self.opt_state).scale)


class Seen(NamedTuple):
    """Of one step: its loss, the largest magnitude of its gradients, and whether all of that is finite."""

    loss: float
    gradient: float
    finite: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
      model: in float32, as it is before the first step.
      loss_fn: `loss_fn(model, batch)`, a scalar.
      batch_at: step number to batch.
      optimizer: without loss scaling.
      policy: the policy, as text.
      scaling: a loss scaling of mpjax's.
    """

    model: nnx.Module
    loss_fn: Callable
    batch_at: Callable[[int], dict]
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adam(1e-2))
    policy: str = "mixed_float16"
    scaling: Callable = static(1024.0)

    def start(self) -> State:
        """The state before the first step."""
        _, params, rest = nnx.split(self._under_policy, nnx.Param, ...)
        return State(params, rest, self._tx.init(params), 0)

    def adopt(self, state: State) -> State:
        """The state of a run under another policy: parameters in this one's dtypes."""
        fresh = self.start()
        params = jax.tree.map(lambda mine, other: other.astype(mine.dtype), fresh.params, state.params)
        same = jax.tree.structure(fresh.opt_state) == jax.tree.structure(state.opt_state)
        return state._replace(params=params, opt_state=state.opt_state if same else self._tx.init(params))

    def step(self, state: State) -> tuple[State, Seen]:
        """One step on the batch of its number; loss scaling skips it where gradients are not finite."""
        with jax.numpy_dtype_promotion("standard"):  # optax promotes
            *after, seen = self._compiled(*state[:3], self.batch_at(state.number))
        loss, gradient, finite = (value.item() for value in seen)
        return State(*after, state.number + 1), Seen(loss, gradient, finite)

    def diagnosed(self, state: State) -> mpjax.Diagnosis:
        """The diagnosis of the step from a state."""
        graph, *_ = nnx.split(self._under_policy, nnx.Param, ...)
        model = nnx.merge(graph, state.params, state.rest, copy=True)
        batch = self.batch_at(state.number)
        return mpjax.diagnose(model, self.loss_fn, batch, policy=self.policy, loss_scale=state.scale)

    @functools.cached_property
    def _tx(self):
        return self.scaling(self.optimizer)

    @functools.cached_property
    def _under_policy(self) -> nnx.Module:
        model = nnx.clone(self.model)
        mpjax.apply_policy(model, self.policy)
        return model

    @functools.cached_property
    def _compiled(self) -> Callable:
        graph, *_ = nnx.split(self._under_policy, nnx.Param, ...)

        def loss_of(params, rest, batch):
            model = nnx.merge(graph, params, rest, copy=True)
            loss = self.loss_fn(model, batch)
            return loss, nnx.split(model, nnx.Param, ...)[2]

        def step(params, rest, opt_state, batch):
            value_and_grad = mpjax.scaled_value_and_grad(loss_of, has_aux=True)
            (loss, new_rest), gradients = value_and_grad(opt_state, params, rest, batch)
            magnitudes = [jnp.max(jnp.abs(g)).astype(jnp.float32) for g in jax.tree.leaves(gradients)]
            largest = jnp.max(jnp.stack(magnitudes))
            updates, opt_state = self._tx.update(gradients, opt_state, params)
            params = optax.apply_updates(params, updates)
            rest = mpjax.where_finite(opt_state, new_rest, rest)
            return params, rest, opt_state, (loss, largest, jnp.isfinite(loss) & jnp.isfinite(largest))

        # Without the option XLA may leave out a rounding to half precision, and with it an overflow.
        return jax.jit(step, compiler_options={"xla_allow_excess_precision": False})


def train_until(run: Run, bad: Callable[[Seen], bool], steps: int = 60) -> State:
    """The state before the first bad step."""
    state = run.start()
    for _ in range(steps):
        after, seen = run.step(state)
        if bad(seen):
            return state
        state = after
    raise AssertionError(f"no bad step in {steps}, the last is {seen}")


def go_on(run: Run, state: State, steps: int) -> list[Seen]:
    """What is seen in the steps from a state."""
    every = []
    for _ in range(steps):
        state, seen = run.step(state)
        every.append(seen)
    return every


# --- Data: scikit-learn's digits


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 8, 8), labels.astype(np.int32)


def chosen(number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits [size, 8, 8] and labels [size] for a step."""
    images, labels = digits()
    rows = np.random.default_rng(number).integers(len(images), size=size)
    return images[rows], labels[rows]


def digit_batch(number: int, size: int = 32) -> dict:
    """Images [size, 8, 8, 1] and labels [size]."""
    x, y = chosen(number, size)
    return {"x": jnp.asarray(x[..., None]), "y": jnp.asarray(y)}


def row_batch(number: int, size: int = 32) -> dict:
    """Images as sequences of rows [size, 8, 8], and labels [size]."""
    x, y = chosen(number, size)
    return {"x": jnp.asarray(x), "y": jnp.asarray(y)}


def composed_batch(number: int, size: int = 4, side: int = 2) -> dict:
    """Noisy pictures [size, 8 side, 8 side, 1] of side x side digits, and where there is ink."""
    x, _ = chosen(number, size * side * side)
    x = x.reshape(size, side, side, 8, 8).transpose(0, 1, 3, 2, 4).reshape(size, 8 * side, 8 * side)
    noise = np.random.default_rng(number).normal(0, 0.2, x.shape).astype(np.float32)
    return {"x": jnp.asarray((x + noise)[..., None]), "y": jnp.asarray((x > 0.4).astype(np.float32))}


# --- Models


def resnet() -> ResNet:
    return ResNet((2,), BasicBlock, SmallStem, channels=1, width=8, num_classes=10, rngs=nnx.Rngs(0))


def unet(networks):
    return networks.UNet(4, rngs=nnx.Rngs(0))


def attention(query, key, value, *, weigh=nnx.softmax, **_) -> jax.Array:
    """Heads [B, T, N, H] weighted by the softmax, in float32, of scores in their own dtype."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    weights = weigh(scores.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


class Block(nnx.Module):
    """A Transformer's: attention and a two-layer network, each behind a norm and around a shortcut."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, attention_fn=attention, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # a rule may widen one of two terms
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.relu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Rows of an image as tokens: [B, T, 8] to the digits' logits [B, 10]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.List([Block(16, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(8 * 16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).reshape(x.shape[0], -1))


def transformer() -> Transformer:
    return Transformer(rngs=nnx.Rngs(0))


class WithLoss(nnx.Module):
    """A network and, as a layer behind it, its loss."""

    def __init__(self, net: nnx.Module, loss: Callable):
        self.net = net
        self.loss = InDtype(loss)

    def __call__(self, batch: dict) -> jax.Array:
        return self.loss(self.net(batch["x"]), batch["y"])


class InDtype(nnx.Module):
    """A function of floating arrays, which it gets in the dtype that the policy sets."""

    def __init__(self, function: Callable):
        self.function = function
        self.dtype = jnp.float32

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        return self.function(*(x.astype(self.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays))


class Before(nnx.Module):
    """A network behind a first layer."""

    def __init__(self, first: nnx.Module, net: nnx.Module):
        self.first = first
        self.net = net

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net(self.first(x))


def own_loss(model, batch):
    return model(batch)


def add_up(x: jax.Array) -> jax.Array:
    """The sum of all, in its own dtype; `jnp.sum` adds in float32."""
    return jax.lax.reduce_sum_p.bind(x, axes=tuple(range(x.ndim)), out_sharding=None)


# --- Faults


class Fault(NamedTuple):
    """What is planted, and what is to be found.

    Attributes:
      run: with the fault.
      verdict: of the diagnosis of the first bad step.
      place: path, direction and operation of the diagnosis; several operations where it hangs on a processor's last
        bits which of them is the first to pass the largest number.
      rules: modules to keep in float32, all the diagnosis is to print.
      says: part of its evidence.
      bad: whether a step is.
      at_start: the verdict on the first step.
    """

    run: Run
    verdict: str
    place: tuple[str | None, str | None, str | tuple[str, ...] | None]
    rules: tuple[str, ...] = ()
    says: str = "In float32"
    bad: Callable[[Seen], bool] = lambda seen: not seen.finite
    at_start: str = "healthy"


def grown(module: str, rate: float) -> optax.GradientTransformation:
    """Adam with a weight decay of the wrong sign for one module, whose kernel grows by `rate` at each step."""

    def mask(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/").startswith(module), params
        )

    return optax.chain(optax.adam(1e-2), optax.masked(optax.add_decayed_weights(rate), mask))


def weights_before_a_norm_grow(networks) -> Fault:
    run = Run(resnet(), networks.labels_loss, digit_batch, grown("blocks/1/conv2", 1.0))
    place = ("blocks/1/conv2", "forward", "conv_general_dilated")
    return Fault(run, "overflow", place, ("blocks/1/conv2",), "magnitudes up to 2^17")


def weights_stored_in_half_grow(networks) -> Fault:
    optimizer = mpjax.master_weights(grown("blocks/1/conv2", 1.0))
    run = Run(resnet(), networks.labels_loss, digit_batch, optimizer, "float16")
    place = ("blocks/1/conv2", "forward", "conv_general_dilated")
    return Fault(run, "overflow", place, ("blocks/1/conv2",))


def an_image_out_of_scale(networks) -> Fault:
    def batch_at(number: int) -> dict:
        batch = digit_batch(number)
        return {**batch, "x": batch["x"].at[0].multiply(1e6 if number >= 12 else 1.0)}

    place = ("stem/conv", "forward", "convert_element_type")
    return Fault(Run(resnet(), networks.labels_loss, batch_at), "overflow", place, ("stem/conv",), "28 of 2048 values")


def a_dead_pixel(networks) -> Fault:
    def batch_at(number: int) -> dict:
        batch = digit_batch(number)
        return {**batch, "x": batch["x"].at[0, 3, 3].set(jnp.nan if number >= 12 else 0.0)}

    says = "an input is not finite: batch/x."
    return Fault(Run(resnet(), networks.labels_loss, batch_at), "not_precision", (None, None, None), says=says)


def a_variance_by_hand(networks) -> Fault:
    """E[x^2] - E[x]^2 of pictures that get brighter and brighter."""

    def normed(x):
        mean = jnp.mean(x)
        return (x - mean) / jnp.sqrt(jnp.mean(x * x) - mean * mean + jnp.asarray(1e-5, x.dtype))

    def batch_at(number: int) -> dict:
        batch = digit_batch(number)
        return {**batch, "x": batch["x"] + 2.0 * number}

    run = Run(Before(InDtype(normed), resnet()), networks.labels_loss, batch_at)
    return Fault(run, "rounding", ("first", "forward", "sqrt"), ("first",), "nearly equal numbers cancel")


def a_scale_that_grows_too_fast(networks) -> Fault:
    scaling = functools.partial(mpjax.dynamic_loss_scaling, growth_interval=2)
    run = Run(resnet(), networks.labels_loss, digit_batch, scaling=scaling)
    return Fault(run, "loss_scale", ("head", "backward", "dot_general"), says="With a loss scale of 65536 instead")


def a_loss_that_fades(networks) -> Fault:
    """A schedule that multiplies the loss, where it was to multiply the update, unscaled."""

    def batch_at(number: int) -> dict:
        return {**digit_batch(number), "weight": jnp.float32(0.4**number)}

    def loss_fn(model, batch):
        return networks.labels_loss(model, batch) * batch["weight"]

    run = Run(resnet(), loss_fn, batch_at, scaling=static(1.0))
    place = ("head", "backward", "convert_element_type")
    return Fault(run, "underflow", place, says="The loss scale is 1.", bad=lambda seen: seen.gradient == 0)


def attention_scores_grow(networks) -> Fault:
    run = Run(transformer(), networks.labels_loss, row_batch, grown("blocks/1/attention/query", 0.5))
    return Fault(run, "overflow", ("blocks/1/attention", "forward", "dot_general"), ("blocks/1/attention",))


def a_residual_branch_grows(networks) -> Fault:
    run = Run(transformer(), networks.labels_loss, row_batch, grown("blocks/0/down", 1.0))
    return Fault(run, "overflow", ("blocks/0/down", "forward", ("dot_general", "add")), ("blocks/0/down",))


def the_logarithm_of_a_softmax(networks) -> Fault:
    """Labels are wrong from a step on where the network is sure of the right ones."""

    def loss(logits, labels):
        right = jnp.take_along_axis(nnx.softmax(4 * logits), labels[:, None], axis=1)
        return -jnp.mean(jnp.log(right))

    def batch_at(number: int) -> dict:
        batch = row_batch(number % 2)
        return {**batch, "y": (batch["y"] + int(number >= 50)) % 10}

    model = transformer()
    model.head.kernel[...] = model.head.kernel[...] * 0.1
    run = Run(WithLoss(model, loss), own_loss, batch_at, scaling=static(1.0))
    return Fault(run, "underflow", ("loss", "forward", "exp"), ("loss",), "to zero in float16, so log in loss")


class MaskedMean(nnx.Module):
    """Tokens [B, T, 8] with weights from a softmax over those that are not blank."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.score = nnx.Linear(8, 1, rngs=rngs)
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        scores = self.score(x)[..., 0].astype(self.dtype)
        scores = jnp.where(jnp.any(x > 0, axis=-1), scores, -1e9)
        return x * nnx.softmax(scores)[..., None]


class Ink(nnx.Module):
    """A digit's pixels [B, T, 8] added up one after another, and what a network makes of its first eight rows."""

    def __init__(self):
        self.total = InDtype(lambda x: jax.lax.scan(lambda t, v: (t + v, None), jnp.zeros_like(x[0]), x)[0])
        self.net = transformer()

    def __call__(self, x: jax.Array) -> jax.Array:
        total = self.total(jnp.swapaxes(x.reshape(x.shape[0], -1), 0, 1))
        return total.astype(jnp.float32) / 64 + self.net(x[:, :8])[:, 0].astype(jnp.float32)


def cross_entropy_by_hand(networks) -> Fault:
    """log(1 - p) in bfloat16, where p is 1 as soon as the network is sure."""

    def loss(logits, mask):
        p = nnx.sigmoid(logits)
        return -jnp.mean(mask * jnp.log(p) + (1 - mask) * jnp.log(1 - p))

    run = Run(
        WithLoss(unet(networks), loss),
        own_loss,
        composed_batch,
        optax.adam(6e-2),
        "p=f32,c=bf16,o=bf16",
        mpjax.no_loss_scaling,
    )
    return Fault(run, "rounding", ("loss", "forward", "log"), ("loss",))


def a_sum_over_all_pixels(networks) -> Fault:
    """A loss added up in half, and pictures of 0 to 4095 where they were of 0 to 1 from a step on."""

    def loss(logits, mask):
        return add_up(optax.sigmoid_binary_cross_entropy(logits, mask)) * jnp.asarray(1e-3, logits.dtype)

    def batch_at(number: int) -> dict:
        batch = composed_batch(number)
        return {**batch, "x": batch["x"] * (4095.0 if number >= 12 else 1.0)}

    run = Run(WithLoss(unet(networks), loss), own_loss, batch_at, scaling=static(1.0))
    return Fault(run, "overflow", ("loss", "forward", "reduce_sum"), ("loss",))


def a_static_scale_that_was_right(networks) -> Fault:
    """A weight of the loss that grows from step to step."""

    def batch_at(number: int) -> dict:
        return {**composed_batch(number), "weight": jnp.float32(1.3**number)}

    def loss_fn(model, batch):
        return networks.mask_loss(model, batch) * batch["weight"]

    run = Run(unet(networks), loss_fn, batch_at, scaling=static(2.0**16))
    place = ("out", "backward", "conv_general_dilated")
    return Fault(run, "loss_scale", place, says="With a loss scale of 2048 instead of 65536")


def a_learning_rate_too_high(networks) -> Fault:
    run = Run(
        unet(networks), networks.mask_loss, composed_batch, optax.sgd(1e3), "mixed_bfloat16", mpjax.no_loss_scaling
    )
    return Fault(run, "not_precision", ("", "forward", "reduce_sum"), says="check the data, the parameters and")


FAULTS = (
    weights_before_a_norm_grow,
    weights_stored_in_half_grow,
    an_image_out_of_scale,
    a_dead_pixel,
    a_variance_by_hand,
    a_scale_that_grows_too_fast,
    a_loss_that_fades,
    attention_scores_grow,
    a_residual_branch_grows,
    the_logarithm_of_a_softmax,
    cross_entropy_by_hand,
    a_sum_over_all_pixels,
    a_static_scale_that_was_right,
    a_learning_rate_too_high,
)

MARKS = {
    a_static_scale_that_was_right: (),  # the U-Net compiles in seconds
    # Found elsewhere, or not at all, where a processor's own float16 arithmetic had other last bits.
    a_variance_by_hand: [pytest.mark.optimized],
    a_residual_branch_grows: [pytest.mark.optimized],
}


@pytest.mark.parametrize(
    "plant", [pytest.param(f, id=f.__name__, marks=MARKS.get(f, [pytest.mark.slow])) for f in FAULTS]
)
def test_a_fault_that_begins_in_training_is_located_named_and_repaired(networks, plant):
    fault = plant(networks)
    run = fault.run
    state = train_until(run, fault.bad)
    assert state.number >= 5
    assert run.diagnosed(run.start()).verdict == fault.at_start

    found = run.diagnosed(state)
    path, direction, operations = fault.place
    assert (found.verdict, found.path, found.direction) == (fault.verdict, path, direction)
    assert found.operation in (operations if isinstance(operations, tuple) else (operations,))
    assert fault.says in found.evidence
    assert found.rules == dict.fromkeys(fault.rules, "float32")

    if fault.verdict == "not_precision":
        assert (found.verified, found.better_scale) == (False, None)
        in_float32 = dataclasses.replace(run, policy="float32", scaling=mpjax.no_loss_scaling)
        assert fault.bad(in_float32.step(in_float32.adopt(state))[1])
        return
    assert found.verified
    if fault.rules:
        policy = ";".join([run.policy, *(f"{path}=float32" for path in found.rules)])
        repaired = dataclasses.replace(run, policy=policy)
        state = repaired.adopt(state)
    else:
        repaired = dataclasses.replace(run, scaling=static(found.better_scale))
        scaled = state.opt_state._replace(scale=jnp.float32(found.better_scale))
        state = state._replace(opt_state=scaled)
    after = go_on(repaired, state, 5)
    assert not any(fault.bad(seen) for seen in after)
    assert abs(after[0].loss / found.loss[1] - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [("resnet", "mixed_float16"), ("transformer", "mixed_bfloat16"), ("unet", "mixed_float16")],
)
def test_no_false_alarm_from_the_start_to_the_end_of_a_healthy_run(networks, family, policy):
    model, loss_fn, batch_at = {
        "resnet": (resnet(), networks.labels_loss, digit_batch),
        "transformer": (transformer(), networks.labels_loss, row_batch),
        "unet": (unet(networks), networks.mask_loss, composed_batch),
    }[family]
    scaling = mpjax.dynamic_loss_scaling if policy == "mixed_float16" else mpjax.no_loss_scaling
    run = Run(model, loss_fn, batch_at, policy=policy, scaling=scaling)
    state, losses = run.start(), []
    for number in range(81):
        if number in (0, 10, 40, 80):
            found = run.diagnosed(state)
            assert (found.verdict, found.path, found.rules) == ("healthy", None, {}), found.evidence
        state, seen = run.step(state)
        losses.append(seen.loss)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])  # it did train
