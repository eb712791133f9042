"""The emulated step against the step itself, run operation by operation in half-precision arrays."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.diagnosis import Emulator, Recorder, program_of, program_of_model, progress
from mpjax.precision import get_policy


FAMILIES = ["mlp", "resnet", "transformer", "unet"]
POLICIES = ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"]


def _equal(first, second) -> bool:
    return all(bool((a.astype(jnp.float32) == b.astype(jnp.float32)).all()) for a, b in zip(first, second, strict=True))


def _relative_error(values, wanted) -> float:
    """Of all arrays together."""
    error = sum(float(jnp.sum(jnp.square(a - b))) for a, b in zip(values, wanted, strict=True))
    return (error / sum(float(jnp.sum(jnp.square(b))) for b in wanted)) ** 0.5


# Each family under two policies, each policy with two families.
CASES = [(family, POLICIES[(i + j) % 4]) for i, family in enumerate(FAMILIES) for j in (0, 3)]


@pytest.mark.parametrize(
    ("family", "policy"),
    [pytest.param(*case, marks=[] if case == ("mlp", "mixed_float16") else [pytest.mark.slow]) for case in CASES],
)
def test_is_the_step_bit_for_bit(networks, family, policy):
    model, loss_fn, batch = networks.make(family)
    scale = 1024.0 if policy.endswith("_float16") or policy == "float16" else 1.0
    program = program_of_model(model, loss_fn, batch, get_policy(policy))
    outputs = Emulator().run(*program.at(scale))
    real = networks.real_step(model, loss_fn, batch, policy, scale, one_by_one=True)
    assert _equal([pair.low for pair in outputs], real)
    assert not _equal([pair.low for pair in outputs], [pair.wide for pair in outputs])


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "mlp" else [pytest.mark.slow]) for family in FAMILIES]
)
def test_the_reference_is_the_float32_step(networks, family):
    model, loss_fn, batch = networks.make(family)
    program = program_of_model(model, loss_fn, batch, get_policy("float16"))  # whose parameters are float16
    outputs = Emulator().run(*program.at(1.0))
    wanted = networks.real_step(model, loss_fn, batch, None)
    # The same operations; but gelu's constants are float16 numbers in the program, off by 2^-12 at most.
    limit = 5e-5 if family == "transformer" else 2e-7
    assert _relative_error([pair.wide for pair in outputs], wanted) < limit
    unrounded = Emulator(rounds=lambda path: False).run(*program.at(1.0))
    assert _equal([pair.low for pair in unrounded], [pair.wide for pair in outputs])
    alone = Emulator(reference=False).run(*program.at(1.0))
    assert _equal([pair.low for pair in alone], [pair.low for pair in outputs])


def test_only_the_modules_asked_for_round(networks):
    model, loss_fn, batch = networks.make("mlp")
    program = program_of_model(model, loss_fn, batch, get_policy("mixed_float16;layers/0=float32;layers/1=float32"))
    ruled = Emulator().run(*program.at(1.0))
    plain = program_of_model(model, loss_fn, batch, get_policy("mixed_float16"))
    kept = Emulator(rounds=lambda path: path not in ("layers/0", "layers/1")).run(*plain.at(1.0))
    assert _equal([pair.low for pair in ruled], [pair.low for pair in kept])


def _scan(x):
    return jax.lax.scan(lambda carry, row: (carry + row * row, carry * row), x[0], x[1:], reverse=True)


def _while(x):
    return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * s[1] + x[0]), (0, x[1]))[1]


def _cond(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x * x, lambda x: x + x, x)


def _switch_in_scan(x):
    branches = [lambda c: c * c, lambda c: c + c, jnp.tanh]
    return jax.lax.scan(lambda c, i: (jax.lax.switch(i, branches, c), c), x[0], jnp.arange(6) % 3)


def _nested(x):
    inner = lambda c, row: (jax.lax.fori_loop(0, 3, lambda i, c: c * row + c, c), c)  # noqa: E731
    return jax.lax.scan(inner, x[0], x)


@jax.custom_vjp
def _own_rule(x):
    return x * x


_own_rule.defvjp(lambda x: (x * x, x), lambda x, ct: (ct * x + ct,))


@jax.custom_jvp
def _own_slope(x):
    return x * x


_own_slope.defjvp(lambda primals, tangents: (primals[0] * primals[0], tangents[0] * primals[0] * primals[0]))

FLOWS = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "switch in scan": _switch_in_scan,
    "loop in scan": _nested,
    "jit": jax.jit(lambda x: jnp.tanh(x) * x),
    "remat": jax.checkpoint(lambda x: jnp.sin(x * x)),
    "remat in scan": lambda x: jax.lax.scan(jax.checkpoint(lambda c, r: (jnp.sin(c * r), c)), x[0], x),
    "custom_vjp": _own_rule,
    "custom_jvp": _own_slope,
    "functions": lambda x: jax.lax.logistic(x) + jnp.expm1(x) + jnp.exp2(x) + jnp.arcsinh(x),
    "functions in scan": lambda x: jax.lax.scan(lambda c, r: (jax.lax.logistic(c) - jnp.tanh(c * r), c), x[0], x),
    "polynomials": lambda x: jnp.log2(jnp.abs(x) + 1) + jnp.polyval(jnp.array([0.5, -1.0, 2.0], x.dtype), x),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "scatter": lambda x: x.at[jnp.array([0, 1, 0])].add(x[:3]),
}


def _flow_program(function, dtype):
    def loss_of(params):
        half = params.astype(dtype)
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(function(half)))

    return program_of(loss_of, jax.random.normal(jax.random.key(0), (6, 4)), {}), loss_of


QUICK_FLOWS = {
    "jit": "float16",
    "scan": "float16",
    "cond": "bfloat16",
    "custom_vjp": "float16",
    "remat": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, QUICK_FLOWS.get(name, dtype), marks=[] if name in QUICK_FLOWS else [pytest.mark.optimized])
        for name, dtype in zip(FLOWS, itertools.cycle(("float16", "bfloat16")), strict=False)
        if name != "while"  # which cannot be differentiated
    ],
)
def test_control_flow_is_the_step_bit_for_bit(name, dtype):
    program, loss_of = _flow_program(FLOWS[name], jnp.dtype(dtype))
    with jax.disable_jit(name not in ("switch in scan", "loop in scan")):
        real = jax.value_and_grad(loss_of)(program.inputs[0])
    quiet = Emulator().run(*program.at(1.0))
    assert _equal([pair.low for pair in quiet], real)
    recorder = Recorder()
    assert _equal([pair.low for pair in Emulator(recorder=recorder).run(*program.at(1.0))], real)
    assert len(recorder.sites) == len(recorder.readings()) > 0
    jitted = jax.jit(lambda inputs: [p.wide for p in Emulator().run(program.jaxpr, inputs)])(program.at(1.0)[1])
    assert _relative_error(jitted, [pair.wide for pair in quiet]) < 1e-6


def test_while_loops_go_round_as_often_as_in_half_precision():
    function = jax.jit(lambda x: jnp.sum(_while(x.astype(jnp.float16)).astype(jnp.float32)))
    x = jax.random.normal(jax.random.key(0), (6, 4))
    jaxpr = jax.make_jaxpr(function)(x)
    recorder = Recorder()
    (out,) = Emulator(recorder=recorder).run(jaxpr, [x])
    with jax.disable_jit():
        assert float(out.low) == float(function(x))
    turns = {s.operation: r.size for s, r in zip(recorder.sites, recorder.readings(), strict=True) if s.shape == (4,)}
    assert turns["mul"] == 5 * 4


def test_what_leaves_a_loop_of_an_unrounded_module_stays_unrounded():
    def body(carry, row):
        with jax.named_scope("kept"):
            return carry * row, carry

    def loss_of(x):
        last, ys = jax.lax.scan(body, x.astype(jnp.float16)[0], x.astype(jnp.float16))
        return jnp.sum((last * last).astype(jnp.float32)) + jnp.sum((ys + ys).astype(jnp.float32))

    program = program_of(loss_of, 100 + jax.random.normal(jax.random.key(0), (3, 4)), {})
    assert not np.isfinite(float(Emulator().run(*program.at(1.0))[0].low))
    kept = Emulator(rounds=lambda path: path != "kept").run(*program.at(1.0))[0]
    assert abs(float(kept.low) / float(kept.wide) - 1) < 2e-3


def test_a_site_names_path_direction_operation_and_line(networks):
    model, loss_fn, batch = networks.make("mlp")
    recorder = Recorder()
    Emulator(recorder=recorder).run(*program_of_model(model, loss_fn, batch, get_policy("mixed_float16")).at(1.0))
    found = {(site.path, site.direction, site.operation) for site in recorder.sites}
    assert ("layers/1", "forward", "dot_general") in found
    assert ("layers/1", "backward", "dot_general") in found
    assert ("head", "forward", "add") in found
    place = next(s.source for s in recorder.sites if s.path == "layers/1")
    assert "/mlp.py:" in place


def test_isolated_a_module_shows_its_own_error_alone():
    class Two(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
            self.first.kernel[...] = self.first.kernel[...] * 1e-9  # all zero in float16

        def __call__(self, x):
            return self.second(self.first(x))

    program = program_of_model(Two(), lambda m, x: m(x).sum(), jnp.ones((2, 8)), get_policy("mixed_float16"))
    errors = {}
    for isolated in (False, True):
        recorder = Recorder()
        Emulator(isolated=isolated, recorder=recorder).run(*program.at(1.0))
        for site, reading in zip(recorder.sites, recorder.readings(), strict=True):
            if site.operation == "dot_general" and site.direction == "forward":
                errors[isolated, site.path] = reading.relative_error
    assert errors[False, "first"] == errors[False, "second"] == errors[True, "first"] == 1.0


def test_rounded_values_are_held_in_their_own_dtype_and_forgotten_after_their_last_use():
    @jax.jit
    def chain(x):
        for _ in range(8):
            x = jnp.sin(x)
        return x

    size, held = 2**16, []

    class Bar(progress._Bar):
        def __init__(self):
            pass  # nothing to draw on

        def start(self, what, total, *, counted):
            pass

        def advance(self):
            held.append(sum(array.nbytes for array in jax.live_arrays()))

    jaxpr = jax.make_jaxpr(lambda x: chain(x.astype(jnp.float16)))(jnp.ones(size))
    x = jnp.linspace(0, 1, size)
    before = sum(array.nbytes for array in jax.live_arrays())
    (out,) = Emulator().run(jaxpr, [x], progress=progress.Progress(Bar()))
    assert (out.wide.dtype, out.low.dtype) == (jnp.float32, jnp.float16)
    # A result beside its operand, each in float32 and in float16; and what an operation has of them in float32.
    assert len(held) == 9
    assert max(held) - before <= 2 * (4 + 2) * size + 4 * size
