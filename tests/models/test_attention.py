"""Multi-head attention: which positions see which, and which implementation runs where."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose
from mpjax.errors import UsageError
from mpjax.models import Attention, attention, implementation_for
from mpjax.precision import apply_policy, default_device
from mpjax.precision.casting import autocast


def module(policy="float32", **options):
    normal = nnx.initializers.normal(0.5)
    model = Attention(16, 2, kernel_init=normal, out_init=normal, rngs=nnx.Rngs(0), **options)
    apply_policy(model, policy)
    return model


X = jax.random.normal(jax.random.key(0), (2, 6, 16))
H100 = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")
T4 = types.SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
MI300 = types.SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD Instinct MI300X")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5e")
CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")


def queries(dtype=jnp.bfloat16, *, length=196, features=64):
    return jax.ShapeDtypeStruct((8, length, 12, features), dtype)


def test_what_comes_later_is_not_seen_if_it_is_causal():
    model, changed = module(is_causal=True), X.at[:, 4].add(1.0)
    before, after = model(X), model(changed)
    assert np.array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 5], after[:, 5])


def test_what_lies_behind_the_length_is_not_seen():
    model, changed = module(), X.at[:, 4:].add(1.0)
    lengths = jnp.array([4, 5], jnp.int32)
    before, after = model(X, lengths), model(changed, lengths)
    assert np.array_equal(before[0, :4], after[0, :4])
    assert not np.allclose(before[1, :4], after[1, :4])


@pytest.mark.parametrize("policy", ["float16", "mixed_bfloat16"])
def test_a_sequence_of_no_length_gives_finite_output_and_gradients(policy):
    model = module(policy)
    graph, params = nnx.split(model)

    @jax.jit
    def run(params, x):
        def loss(params, x):
            out = nnx.merge(graph, params)(x, jnp.zeros(2, jnp.int32))
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    for leaf in jax.tree.leaves(run(params, X)):
        assert np.isfinite(leaf.astype(jnp.float32)).all()


def test_half_precision_is_near_float32():
    lengths = jnp.array([4, 6], jnp.int32)
    wide = module()(X, lengths)
    np.testing.assert_allclose(
        jax.jit(module("mixed_float16"))(X, lengths), wide, atol=5e-3 * float(jnp.abs(wide).max())
    )


def loss(model, x):
    return jnp.mean(jnp.square(model(x, jnp.array([4, 0], jnp.int32)).astype(jnp.float32)))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "epsilon"), [("mixed_float16", 2**-10), ("mixed_bfloat16", 2**-7)])
def test_under_autocast_it_is_near_float32(policy, epsilon):
    actual = jax.tree.leaves(nnx.jit(nnx.grad(autocast(loss, policy)))(module(), X))
    exact = jax.tree.leaves(nnx.grad(loss)(module(), X))
    # The largest of all: the gradient of the bias of the keys is zero, for it moves all scores of a query alike.
    largest = max(float(jnp.abs(leaf).max()) for leaf in exact)
    assert {leaf.dtype for leaf in actual} == {jnp.dtype("float32")}
    for a, b in zip(actual, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=16 * epsilon * largest)  # scores of up to 27 are rounded


@pytest.mark.slow
def test_a_diagnosis_reads_it_and_names_a_projection_that_overflows():
    model = module()
    assert diagnose(model, loss, X, loss_scale=1024.0).verdict == "healthy"
    model.key.kernel[...] = 1e5 * model.key.kernel[...]
    found = diagnose(model, loss, X, loss_scale=1024.0, search=False)
    assert (found.verdict, found.path) == ("overflow", "key")


def test_a_width_that_the_heads_do_not_divide_is_an_error():
    with pytest.raises(UsageError, match="attention of width 16 cannot have 3 heads"):
        Attention(16, 3, kernel_init=nnx.initializers.zeros, out_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("width", "heads", "fitting"), [(32, 12, 8), (100, 12, 10), (7, 3, 1), (4, 12, 4)])
def test_the_largest_number_of_heads_that_divides_the_width_is_proposed(width, heads, fitting):
    zeros = nnx.initializers.zeros
    with pytest.raises(UsageError, match=f"write --model.heads {fitting}$") as refused:
        Attention(width, heads, kernel_init=zeros, out_init=zeros, rngs=nnx.Rngs(0))
    assert refused.value.repair == {"model.heads": fitting}


# Implementations


@pytest.mark.parametrize(
    ("device", "query", "chosen"),
    [
        (H100, queries(), "cudnn"),
        (H100, queries(jnp.float16), "cudnn"),
        (H100, queries(jnp.float32), "xla"),
        (H100, queries(length=197), "cudnn"),
        (H100, queries(features=128), "cudnn"),
        (H100, queries(features=12), "xla"),
        (H100, queries(features=256), "xla"),
        (T4, queries(jnp.float16), "xla"),
        (MI300, queries(), "xla"),
        (TPU, queries(), "xla"),
        (CPU, queries(), "xla"),
    ],
)
def test_cudnn_is_chosen_where_it_can_train(device, query, chosen):
    assert implementation_for(query, device) == chosen


def test_the_default_device_decides(monkeypatch):
    assert implementation_for(queries()) == "xla"
    monkeypatch.setattr(attention, "default_device", lambda: H100)
    assert implementation_for(queries()) == "cudnn"


def test_a_default_device_of_the_users_is_heeded():
    with jax.default_device(jax.devices("cpu")[1]):
        assert default_device() == jax.devices("cpu")[1]
    assert default_device() == jax.devices("cpu")[0]


@pytest.mark.parametrize(("dtype", "expected"), [("mixed_bfloat16", "cudnn"), ("float32", None)])
def test_cudnn_gets_lengths_of_one_at_the_least(monkeypatch, dtype, expected):
    calls = []

    def fake(query, key, value, **options):
        calls.append(options)
        return value

    monkeypatch.setattr(attention, "default_device", lambda: H100)
    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    module(dtype, is_causal=True)(X, jnp.array([0, 5], jnp.int32))
    assert [options["implementation"] for options in calls] == ([expected] if expected else [])
    for options in calls:
        assert options["is_causal"]
        assert options["key_value_seq_lengths"].tolist() == [1, 5]


@pytest.mark.parametrize(
    ("device", "query", "reason"),
    [
        (CPU, queries(), "needs a GPU, this is a cpu"),
        (MI300, queries(), "needs an NVIDIA GPU, this is a AMD Instinct MI300X"),
        (T4, queries(), "needs compute capability 8.0, Tesla T4 has 7.5"),
        (H100, queries(jnp.float32), "computes in float16 or bfloat16, not in float32"),
        (H100, queries(features=12), "needs heads of 8, 16, ... or 128 features, got 12"),
    ],
)
def test_cudnn_where_it_cannot_run_is_an_error_with_the_reason(monkeypatch, device, query, reason):
    monkeypatch.setattr(attention, "default_device", lambda: device)
    with pytest.raises(UsageError, match=reason):
        attention.attend(query, query, query, implementation="cudnn")


def test_an_unknown_implementation_is_an_error():
    with pytest.raises(UsageError, match="attention implementation 'flash': wanted 'auto', 'xla' or 'cudnn'"):
        module(implementation="flash")(X)


# Windows


def attended(*, is_causal=True, **options):
    """Which positions change with position 2 of 6, as 1 for a change."""
    query = jax.random.normal(jax.random.key(1), (1, 6, 2, 8))
    value = jnp.zeros((1, 6, 2, 8)).at[:, 2].set(1.0)
    out = attention.attend(query, query, value, is_causal=is_causal, **options)
    return (jnp.abs(out[0, :, 0, 0]) > 0).astype(int).tolist()


@pytest.mark.parametrize(
    ("window", "seen"),
    [(None, [0, 0, 1, 1, 1, 1]), (1, [0, 0, 1, 0, 0, 0]), (3, [0, 0, 1, 1, 1, 0]), (6, [0, 0, 1, 1, 1, 1])],
)
def test_a_window_counts_the_position_itself(window, seen):
    assert attended(window=window) == seen
    assert attended(window=None if window is None else jnp.int32(window)) == seen
    assert attended(window=window, lengths=jnp.array([2], jnp.int32))[:2] == [0, 0]


@pytest.mark.parametrize(
    ("window", "seen"),
    [(None, [1, 1, 1, 1, 1, 1]), (1, [0, 0, 1, 0, 0, 0]), (2, [0, 1, 1, 1, 0, 0]), (6, [1, 1, 1, 1, 1, 1])],
)
def test_a_window_of_attention_that_is_not_causal_is_on_both_sides(window, seen):
    assert attended(is_causal=False, window=window) == seen
    assert attended(is_causal=False, window=None if window is None else jnp.int32(window)) == seen
    assert attended(is_causal=False, window=window, lengths=jnp.array([2], jnp.int32))[:2] == [0, 0]


def test_cudnn_gets_a_window_on_both_sides_as_a_mask(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "default_device", lambda: H100)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **options: calls.append(options) or query)
    query = jnp.zeros((2, 4, 2, 8), jnp.float16)
    attention.attend(query, query, query, window=2)
    attention.attend(query, query, query, window=2, lengths=jnp.array([4, 2], jnp.int32))
    near = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    cut = [[*row[:2], 0, 0] for row in near]
    assert [options["mask"].astype(int).tolist() for options in calls] == [[[near]] * 2, [[near], [cut]]]
    assert [options["is_causal"] or options["key_value_seq_lengths"] is not None for options in calls] == [False] * 2
    attention.attend(query, query, query, window=jnp.int32(2))  # of a loop over layers of several kinds
    assert np.array_equal(calls[-1]["mask"], calls[0]["mask"])
    attention.attend(query, query, query, window=4)
    assert calls[-1]["mask"] is None


def test_cudnn_gets_the_window_without_the_position_itself(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "default_device", lambda: H100)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **options: calls.append(options) or query)
    query = jnp.zeros((1, 6, 2, 8), jnp.float16)
    for window in (3, None, 6):
        attention.attend(query, query, query, is_causal=True, window=window, scale=0.5)
    assert [options.get("local_window_size") for options in calls] == [(2, 0), None, None]
    assert {options["scale"] for options in calls} == {0.5}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "window": 2},
        {"window": 2},
        {"lengths": jnp.array([5, 2], jnp.int32)},
        {"segments": jnp.array([[0, 0, 1, 1, 1], [7, 7, 7, 2, 2]], jnp.int32)},
        {"segments": jnp.array([[0, 0, 1, 1, 1], [7, 7, 7, 2, 2]], jnp.int32), "is_causal": True, "window": 2},
    ],
    ids=", ".join,
)
def test_cudnn_gets_an_even_number_of_positions_for_the_same_values_and_gradients(monkeypatch, options):
    """Of 5 positions, as of the 197 of a ViT with a class token; JAX's own attention in float32 stands for cuDNN's."""
    shapes, of_jax = [], jax.nn.dot_product_attention

    def fused(*arrays, implementation, **given):
        assert implementation == "cudnn"
        shapes.extend(array.shape[1] for array in arrays)
        wide = [array.astype(jnp.float32) for array in arrays]
        return of_jax(*wide, implementation="xla", **given).astype(arrays[0].dtype)

    monkeypatch.setattr(attention, "default_device", lambda: H100)
    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    query, key, value, slope = jax.random.normal(jax.random.key(0), (4, 2, 5, 2, 8), jnp.float16)

    def values_and_gradients(implementation):
        attended = functools.partial(attention.attend, implementation=implementation, **options)
        values, backward = jax.vjp(attended, query, key, value)
        return values, *backward(slope)

    for actual, expected in zip(values_and_gradients("auto"), values_and_gradients("xla"), strict=True):
        assert actual.shape == expected.shape == (2, 5, 2, 8)
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)
    assert shapes == [6, 6, 6]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"cap": 50.0}, "does not cap scores"), ({"window": jnp.int32(3)}, "needs a window that is known at trace time")],
)
def test_what_cudnn_has_no_kernel_for_runs_without_it(monkeypatch, options, reason):
    monkeypatch.setattr(attention, "default_device", lambda: H100)
    query = jnp.zeros((1, 6, 2, 8), jnp.float16)
    assert attention.attend(query, query, query, is_causal=True, **options).shape == query.shape
    with pytest.raises(UsageError, match=f"attention with 'cudnn' {reason}"):
        attention.attend(query, query, query, is_causal=True, implementation="cudnn", **options)


# Segments


def test_segments_windows_and_lengths_hold_together():
    segments = jnp.array([[0, 1, 1, 1, 1, 2]], jnp.int32)
    assert attended(segments=segments) == [0, 0, 1, 1, 1, 0]
    assert attended(segments=segments, window=2) == [0, 0, 1, 1, 0, 0]
    assert attended(segments=segments, window=jnp.int32(2)) == [0, 0, 1, 1, 0, 0]
    assert attended(segments=segments, lengths=jnp.array([2], jnp.int32))[:5] == [0, 0, 0, 0, 0]
    assert attended(segments=jnp.array([[0, 0, 1, 0, 0, 0]], jnp.int32)) == [0, 0, 1, 0, 0, 0]


def test_cudnn_gets_segments_windows_and_lengths_as_one_mask(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "default_device", lambda: H100)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **options: calls.append(options) or query)
    query, lengths = jnp.zeros((1, 6, 2, 8), jnp.float16), jnp.array([4], jnp.int32)
    segments = jnp.array([[0, 0, 0, 1, 1, 1]], jnp.int32)
    attention.attend(query, query, query, is_causal=True, segments=segments, lengths=lengths, window=2)
    ((options,),) = (calls,)
    assert options["implementation"] == "cudnn"
    assert "local_window_size" not in options
    assert options["key_value_seq_lengths"] is None
    seen = np.tril(options["mask"][0, 0]).astype(int)
    assert options["mask"].shape == (1, 1, 6, 6)
    assert seen.tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
