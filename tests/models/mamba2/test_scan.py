"""The recurrence of Mamba-2 by chunks equals its definition step by step, and its long sums are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.errors import UsageError
from mpjax.models import Apart
from mpjax.models.generation import generate, through_cache
from mpjax.models.mamba2 import Mamba2, Mamba2Settings, settings_of, state_space
from mpjax.precision import name_scopes, scope_policy
from mpjax.precision.casting import equations


SETTINGS = Mamba2Settings(
    vocabulary=20, width=8, layers=2, heads=4, head_features=4, groups=2, state=3, chunk=4, steps=(0.01, 1.0)
)
TOKENS = jnp.asarray([[1, 4, 3, 2, 9, 8, 7, 6, 5, 11, 12], [1, 3, 3, 3, 19, 1, 2, 6, 0, 1, 2]], jnp.int32)


def operands(length, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x, inputs, outputs = (
        jax.random.normal(key, (2, length, *shape), jnp.float32).astype(dtype)
        for key, shape in zip(keys, [(4, 3), (2, 5), (2, 5)], strict=False)
    )
    steps = jax.nn.softplus(jax.random.normal(keys[3], (2, length, 4)))
    return x, steps, -jnp.asarray([0.1, 0.5, 1.0, 3.0]), inputs, outputs


def step_by_step(x, steps, rates, inputs, outputs, before=None, begins=()):
    """h = exp(d a) h + d x B, y = C h, in float64 by NumPy; the state is zero before the positions in `begins`."""
    x, steps, rates, inputs, outputs = (np.asarray(array, np.float64) for array in (x, steps, rates, inputs, outputs))
    inputs, outputs = (np.repeat(array, 2, axis=2) for array in (inputs, outputs))
    h = np.zeros((2, 4, 3, 5)) if before is None else np.asarray(before, np.float64)
    y = np.zeros(x.shape)
    for t in range(x.shape[1]):
        h = np.zeros_like(h) if t in begins else h
        fed = steps[:, t, :, None, None] * x[:, t, :, :, None] * inputs[:, t, :, None, :]
        h = np.exp(steps[:, t] * rates)[..., None, None] * h + fed
        y[:, t] = np.einsum("bhpn,bhn->bhp", h, outputs[:, t])
    return y, h


@pytest.mark.parametrize(("length", "chunk"), [(11, 4), (8, 4), (3, 4), (1, 4)])
def test_chunks_compute_the_recurrence(length, chunk):
    y, state = state_space(*operands(length), chunk=chunk)
    expected, last = step_by_step(*operands(length))
    np.testing.assert_allclose(y, expected, atol=2e-5)
    np.testing.assert_allclose(state, last, atol=2e-5)


def test_a_state_is_continued():
    whole = operands(11)
    first, second = (
        [array if array.ndim == 1 else array[:, part] for array in whole] for part in (np.s_[:6], np.s_[6:])
    )
    _, state = state_space(*first, chunk=4)
    y, last = state_space(*second, chunk=4, before=state)
    expected, expected_last = step_by_step(*whole)
    np.testing.assert_allclose(y, expected[:, 6:], atol=2e-5)
    np.testing.assert_allclose(last, expected_last, atol=2e-5)


@pytest.mark.parametrize("begins", [(5,), (4, 9), (2, 3, 8)])
def test_a_document_begins_with_no_state(begins):
    segments = jnp.broadcast_to(jnp.cumsum(jnp.isin(jnp.arange(11), jnp.asarray(begins)).astype(jnp.int32)), (2, 11))
    y, state = state_space(*operands(11), chunk=4, segments=segments)
    expected, last = step_by_step(*operands(11), begins=begins)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    np.testing.assert_allclose(state, last, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "last", "off", "kept"), [("bfloat16", -51.5, 0.69, 1.0), ("float16", -51.0625, 0.14, 0.9105)]
)
def test_a_sum_over_512_positions_in_half_precision_is_wrong_and_ours_is_not(dtype, last, off, kept):
    """512 times -0.1 is -51.2, and what the last step keeps is exp(-0.1) = 0.9048; bfloat16 says that it keeps all."""
    half = np.asarray(jnp.cumsum(jnp.full(512, -0.1, dtype)), np.float64)
    assert half[-1] == last
    assert np.max(np.abs(half + 0.1 * np.arange(1, 513))) > off
    assert np.exp(half[-1] - half[-2]) == pytest.approx(kept, abs=1e-4)
    x = jnp.zeros((1, 512, 1, 1), dtype).at[0, 510].set(1.0)
    ones, steps = jnp.ones((1, 512, 1, 1), dtype), jnp.full((1, 512, 1), 0.1)
    y, state = state_space(x, steps, -jnp.ones(1), ones, ones, chunk=512)
    assert float(y[0, -1, 0, 0]) == pytest.approx(0.1 * 0.904837, rel=4e-3)  # operands are rounded, sums are not
    assert float(state[0, 0, 0, 0]) == pytest.approx(0.1 * 0.904837, rel=4e-3)


LONG = ("exp", "log1p", "cumsum", "reduce_sum", "scan")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "O3", "O1"])
def test_sums_and_exponentials_are_float32_forward_and_backward(policy):
    model = Mamba2(SETTINGS, rngs=nnx.Rngs(0))
    name_scopes(model)
    if policy == "O1":
        mpjax.apply_policy(model, "float32")
    else:
        mpjax.apply_policy(model, policy)
    graph, params = nnx.split(model)

    def run(params):
        return nnx.merge(graph, params)(TOKENS)

    run = mpjax.autocast(run, scope_policy(model, mpjax.get_policy("O1"))) if policy == "O1" else run
    program = jax.make_jaxpr(jax.grad(lambda params: jnp.sum(jnp.square(run(params).astype(jnp.float32)))))(params)
    half = {jnp.dtype("float16"), jnp.dtype("bfloat16")}
    norms_in_half = policy == "O3"
    seen = set()
    for scope, eqn in equations(program.jaxpr):
        name = eqn.primitive.name
        if name in LONG and "mixer" in str(scope) and not (norms_in_half and "norm" in str(scope)):
            seen.add(name)
            assert not half & {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}, (scope, eqn)
        if name == "dot_general" and policy != "O3":
            assert {v.aval.dtype for v in eqn.invars} <= half, (scope, eqn)
    assert {"exp", "cumsum", "reduce_sum"} <= seen


def test_the_policy_shows_the_rule():
    rows = {row.path: row for row in mpjax.apply_policy(Mamba2(SETTINGS, rngs=nnx.Rngs(0)), "float16")}
    space = rows["blocks/0/mixer/space"]
    assert (space.param_dtype, space.compute_dtype, space.rule) == (np.float32, np.float32, "type:StateSpace")
    assert rows["blocks/0/mixer/norm"].rule == "type:norm"
    assert rows["blocks/0/mixer/in_proj"].compute_dtype == np.float16


def test_generation_continues_the_state():
    model = Mamba2(SETTINGS, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(through_cache(model, TOKENS, prompt=5), model(TOKENS), atol=1e-5)


@pytest.mark.slow
def test_prompts_of_unequal_lengths_are_continued_as_alone():
    """The padding of the shorter prompt changes neither its state nor the inputs of its convolution."""
    model = Mamba2(SETTINGS, rngs=nnx.Rngs(0))
    prompts = [TOKENS[0].tolist(), TOKENS[1, :2].tolist()]
    together = generate(model, prompts, max_tokens=4)
    for prompt, result in zip(prompts, together, strict=True):
        tokens = list(prompt)
        for token in result.tokens:
            logits = model(jnp.asarray([tokens], jnp.int32))[0, -1]
            assert int(jnp.argmax(logits)) == token
            tokens.append(token)


def test_documents_are_apart():
    model = Mamba2(SETTINGS, rngs=nnx.Rngs(0))
    alone = [model(TOKENS[1:, :5]), model(TOKENS[1:, 5:9]), model(TOKENS[1:, 9:])]
    model.documents = Apart(1)
    np.testing.assert_allclose(model(TOKENS[1:]), jnp.concatenate(alone, axis=1), atol=1e-5)


CONFIG = {
    "model_type": "mamba2",
    "hidden_size": 8,
    "num_heads": 4,
    "head_dim": 4,
    "n_groups": 2,
    "state_size": 3,
    "num_hidden_layers": 1,
    "vocab_size": 20,
    "time_step_limit": [0.01, {"__float__": "Infinity"}],
}


def test_settings_of_a_config():
    settings = settings_of(CONFIG)
    assert (settings.inner, settings.steps, settings.chunk) == (16, (0.01, float("inf")), 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expand": 3}, "expand is 3: wanted num_heads x head_dim / hidden_size, 2"),
        ({"n_groups": 3}, "num_heads is 4: wanted a multiple of n_groups, 3"),
        ({"time_step_limit": [0.1]}, r"time_step_limit is \[0.1\]: wanted two numbers"),
        ({"time_step_limit": [2.0, 1.0]}, "the smaller one first"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu": wanted silu or swish'),
        ({"attention_layers": [1]}, r"mpjax does not know attention_layers \[1\]"),
        ({"architectures": ["MambaForCausalLM"]}, "architectures is"),
    ],
)
def test_settings_that_are_not_understood_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        settings_of({**CONFIG, **change})
