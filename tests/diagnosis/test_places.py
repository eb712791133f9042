"""Where a fault is said to be, and the cheaper way than a rule: the line, its caller, the loop, the index."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose


def mean_square(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def _line_of(text: str) -> str:
    """The first line of this file that has a text."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, start=1) if text in line)}"


class Stem(nnx.Module):
    """A product, and a line behind it that overflows; the product's results are in range."""

    def __init__(self):
        self.proj, self.dtype = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.float32
        self.proj.kernel[...] = self.proj.kernel[...] * 300

    def __call__(self, x):
        hidden = self.proj(x)
        size = jnp.mean(hidden * hidden, -1, keepdims=True) * 1e-4
        return hidden / (1 + size)


class Net(nnx.Module):
    def __init__(self):
        self.stem, self.head = Stem(), nnx.Linear(64, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.stem(x))


X = jax.random.normal(jax.random.key(0), (32, 64))


@pytest.mark.slow
def test_one_line_in_float32_is_told_beside_a_rule_for_most_of_the_flops():
    found = diagnose(Net(), mean_square, X, policy="mixed_float16")
    assert (found.verdict, found.rules, found.float32_flops > 0.9) == ("overflow", {"stem": "float32"}, True)
    line = _line_of("size = jnp.mean(hidden")
    assert found.source == line
    assert found.advice[1].startswith(f"Cheaper: only this line in float32, {line}. Call .astype(jnp.float32)")
    assert found.advice[1].endswith("(0.0% of the FLOPs, verified by running).")


def test_the_advice_of_one_line_repairs_the_step():
    class Cast(Stem):
        def __call__(self, x):
            hidden = self.proj(x)
            wide = hidden.astype(jnp.float32)
            size = (jnp.mean(wide * wide, -1, keepdims=True) * 1e-4).astype(hidden.dtype)
            return hidden / (1 + size)

    model = Net()
    model.stem = Cast()
    assert diagnose(model, mean_square, X, policy="mixed_float16").verdict == "healthy"


def test_no_line_is_told_where_the_line_is_the_product_or_does_not_repair():
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 4, rngs=nnx.Rngs(1)))
    model.layers[0].kernel[...] *= 1e5
    model.layers[1].kernel[...] *= 1e-5
    found = diagnose(model, mean_square, X, policy="mixed_float16")
    assert found.verdict == "overflow"
    assert found.verified
    assert not any("only this line" in line for line in found.advice)


class MeanSquares(nnx.Module):
    """An RMS norm as a user writes it: no dtype, and squares that pass 65,504."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones((1, 64)))

    def __call__(self, x):
        x = x * 300
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1) * self.scale[...].astype(x.dtype)


def test_a_module_of_ones_own_is_kept_in_float32_and_not_the_layer_before_it():
    first, last = (nnx.Linear(64, 64, rngs=nnx.Rngs(seed)) for seed in range(2))
    model = nnx.Sequential(first, MeanSquares(), last)
    found = diagnose(model, mean_square, X, policy="mixed_float16")
    assert (found.verdict, found.path) == ("overflow", "layers/1")
    assert (found.rules, found.verified, found.float32_flops) == ({"layers/1": "float32"}, True, 0.0)


def shared(x):
    return jnp.square(x) * 1e-3


class Helped(nnx.Module):
    def __init__(self):
        self.first, self.second = (nnx.Linear(64, 64, rngs=nnx.Rngs(seed)) for seed in range(2))
        self.second.kernel[...] = self.second.kernel[...] * 1000
        self.head = nnx.Linear(64, 4, rngs=nnx.Rngs(2))

    def __call__(self, x):
        hidden = shared(self.first(x))
        hidden = shared(self.second(hidden + x.astype(hidden.dtype)))
        return self.head(hidden)


@pytest.mark.slow
def test_the_caller_of_a_shared_line_is_told():
    found = diagnose(Helped(), mean_square, X, policy="mixed_float16")
    assert found.source == _line_of("return jnp.square(x) * 1e-3")
    caller = _line_of("hidden = shared(self.second(")
    assert f"That line is called from several places, here from {caller}." in found.evidence


def test_no_caller_is_told_of_a_line_that_is_called_once():
    assert "several places" not in diagnose(Net(), mean_square, X, policy="mixed_float16").evidence


class Decay(nnx.Module):
    """A weight that is multiplied in every step of a loop."""

    def __init__(self):
        self.w, self.dtype = nnx.Param(jnp.ones(8)), jnp.float32

    def __call__(self, x):
        start = self.w[...].astype(self.dtype)
        return jax.lax.scan(lambda carry, row: (carry * row, None), start, x.astype(self.dtype))[0]


class Fading(nnx.Module):
    def __init__(self):
        self.decay = Decay()

    def __call__(self, x):
        return self.decay(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [pytest.param(40, id="to subnormal numbers"), pytest.param(100, id="to zero")],
)
def test_a_slow_underflow_through_a_loop_names_the_loop(steps):
    def loss_fn(model, x):
        return jnp.sum(model(x).astype(jnp.float32))

    found = diagnose(Fading(), loss_fn, jnp.full((steps, 8), 0.6), policy="mixed_float16")
    assert (found.verdict, found.path, found.operation) == ("underflow", "decay", "mul")
    assert f"little by little in a loop of {steps} steps" in found.evidence
    assert (found.rules, found.verified) == ({"decay": "float32"}, True)


def test_a_gradient_that_fades_in_a_loop_names_the_loop():
    def loss_fn(model, x):
        return jnp.sum(model(x).astype(jnp.float32)) + 1

    found = diagnose(Fading(), loss_fn, jnp.full((60, 8), 0.6), policy="mixed_float16")
    assert (found.verdict, found.path) == ("underflow", "decay")
    assert "little by little in a loop of 60 steps" in found.evidence


@jax.custom_vjp
def root(x):
    return jnp.sqrt(x)


def _root_and_square(x):
    return jnp.sqrt(x), jnp.square(x * 1000)  # read by the derivative alone


root.defvjp(_root_and_square, lambda kept, cotangent: (cotangent + kept * 1e-6,))


class Rooted(nnx.Module):
    def __init__(self):
        self.w, self.dtype = nnx.Param(jnp.full(4, 0.5)), jnp.float32

    def __call__(self, x):
        return root(self.w[...].astype(self.dtype)[None] * x.astype(self.dtype))


def test_an_operation_that_the_loss_does_not_depend_on_is_in_the_backward_pass():
    found = diagnose(Rooted(), mean_square, jnp.ones((2, 4)), policy="mixed_float16")
    assert (found.verdict, found.direction, found.operation) == ("overflow", "backward", "square")


class Large(Rooted):
    def __call__(self, x):
        return (self.w[...].astype(self.dtype)[None] * x.astype(self.dtype) + 1e7) * 1e-9


def test_numpy_does_not_warn_of_constants_that_half_precision_does_not_have():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = diagnose(Large(), mean_square, jnp.ones((2, 4)), policy="mixed_float16")
    assert (found.verdict, found.operation) == ("overflow", "constant 1e+07")
