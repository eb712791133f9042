"""The audit of a function: which dtype everything in it really has, and what is wrong."""

import functools
import itertools
import json
import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import mpjax
from mpjax import models
from mpjax.config import DIFFUSION_MODELS, MODELS, Model
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.precision import Policy, apply_policy, audit, get_policy, storage_policy
from mpjax.precision.casting import autocast


F16, BF16, F32 = np.dtype("float16"), np.dtype(jnp.bfloat16), np.dtype("float32")
HALF = jnp.ones((2, 4), jnp.float16)
WIDE = jnp.ones((4, 3), jnp.float32)


@pytest.fixture(autouse=True)
def standard_promotion():
    """What users have; elsewhere in these tests promotion is strict, and there are no silent upcasts to find."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    """Convolution, batch norm and a linear layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.mean(nnx.relu(self.norm(self.conv(x))), axis=(1, 2)))


def net(policy: str) -> Net:
    model = Net(nnx.Rngs(0))
    apply_policy(model, policy)
    return model


IMAGES = jnp.ones((2, 6, 6, 1), jnp.float16)


def rows(report, operation: str) -> list[tuple[str, str, int]]:
    return [(row.path, str(row.dtype), row.count) for row in report if row.operation == operation]


def test_products_and_sums_are_counted_by_module_and_dtype():
    report = audit(net("mixed_float16"), IMAGES, policy="mixed_float16")
    assert rows(report, "conv_general_dilated") == [("conv", "float16", 1)]
    assert rows(report, "dot_general") == [("head", "float16", 1)]
    assert rows(report, "reduce_sum") == [("norm", "float32", 2), ("", "float32", 1)]
    assert rows(report, "rsqrt") == [("norm", "float32", 1)]
    assert {row.kind for row in report if row.operation == "dot_general"} == {"low"}


def test_a_model_under_its_policy_is_clean():
    report = audit(net("mixed_float16"), IMAGES, policy="mixed_float16")
    report.assert_clean()
    assert report
    assert report.faults == []


def test_a_model_keeps_its_values_and_its_statistics():
    model = net("mixed_float16")
    before = jax.tree.map(np.asarray, nnx.state(model))
    audit(model, IMAGES)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_abstract_models_and_inputs_are_enough():
    model = nnx.eval_shape(lambda: net("mixed_bfloat16"))
    report = audit(model, jax.ShapeDtypeStruct((2, 6, 6, 1), jnp.bfloat16), policy="mixed_bfloat16")
    report.assert_clean()
    assert rows(report, "conv_general_dilated") == [("conv", "bfloat16", 1)]


def test_casts_are_counted_by_what_they_cast_to():
    report = audit(lambda x: x.astype(jnp.float32).astype(jnp.bfloat16), HALF)
    assert rows(report, "convert_element_type") == [("", "float32", 1), ("", "bfloat16", 1)]
    assert {row.kind for row in report} == {"cast"}


def test_operations_on_integers_are_left_out():
    assert audit(lambda n: n + 1, jnp.arange(3)).operations == ()


def test_a_loop_counts_its_body_once():
    def fn(w, x):
        return jax.lax.scan(lambda carry, _: (carry @ w, None), x, None, length=7)[0]

    assert rows(audit(fn, jnp.eye(4), jnp.ones((2, 4))), "dot_general") == [("", "float32", 1)]


def test_the_backward_pass_is_counted_in_the_module_it_belongs_to():
    def loss(model, x):
        return jnp.mean(model(x))

    report = audit(nnx.grad(loss), net("mixed_float16"), IMAGES, policy="mixed_float16")
    assert rows(report, "dot_general") == [("head", "float16", 3)]
    report.assert_clean()


# Silent upcasts


@pytest.mark.parametrize(
    ("fn", "operation"),
    [
        (lambda x, w: x @ w, "dot_general"),
        (lambda x, w: x[0] + w[:, 0], "add"),
        (lambda x, w: x * np.float32(2), "mul"),
        (lambda x, w: jnp.where(x > 0, x, w[0, 0]), "select_n"),
        (lambda x, w: jnp.concatenate([x, w[:2, :1]], axis=1), "concatenate"),
        (lambda x, w: w.at[0].add(x[0, :3]), "scatter-add"),
        (jax.jit(lambda x, w: x @ w), "dot_general"),
        (jax.checkpoint(lambda x, w: x @ w), "dot_general"),
    ],
    ids=["matmul", "add", "numpy scalar", "where", "concatenate", "scatter", "in jit", "in remat"],
)
def test_a_half_value_that_meets_a_float32_one_is_named_with_its_line(fn, operation):
    (upcast,) = audit(fn, HALF, WIDE).upcasts
    assert (upcast.operation, upcast.from_dtype, upcast.to_dtype) == (operation, F16, F32)
    assert re.search(r"test_dtype_audit\.py:\d+$", upcast.source)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x.astype(jnp.float32) @ w,
        lambda x, w: jnp.asarray(x, jnp.float32) @ w,
        lambda x, w: jax.lax.convert_element_type(x, jnp.float32) @ w,
        lambda x, w: x * 2.0,
        lambda x, w: jnp.mean(x) + jnp.sum(x) + jnp.var(x),
        lambda x, w: jax.nn.softmax(x),
        lambda x, w: x @ w.astype(x.dtype),
        lambda x, w: jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32),
        lambda x, w: mpjax.autocast(lambda x: (x @ w).astype(jnp.float32) + x[0, 0], "mixed_float16")(x),
    ],
    ids=["astype", "asarray", "convert", "python scalar", "reductions", "softmax", "narrowed", "preferred", "autocast"],
)
def test_what_was_asked_for_is_no_silent_upcast(fn):
    assert audit(fn, HALF, WIDE).upcasts == ()


@jax.custom_jvp
def cubed(x):
    return (x.astype(jnp.float32) ** 3 * jnp.float32(0.5)).astype(x.dtype)


@cubed.defjvp
def cubed_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return cubed(x), (tangent.astype(jnp.float32) * (1.5 * x.astype(jnp.float32) ** 2)).astype(x.dtype)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint], ids=["kept", "recomputed"])
def test_casts_in_a_derivative_rule_are_no_silent_upcasts_forwards_and_backwards(wrap):
    loss = jax.grad(lambda x: jnp.mean(wrap(cubed)(x).astype(jnp.float32)))
    assert audit(loss, HALF, params=None).upcasts == ()


def test_a_flax_layer_without_dtype_widens_a_half_input_to_its_parameters():
    (upcast,) = audit(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), HALF).upcasts
    assert (upcast.operation, upcast.shape) == ("dot_general", (2, 4))


def test_a_widening_that_a_rule_asks_for_is_none():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    policy = Policy("float32", "float16", "float32", rules={"layers/1": "float32"})
    apply_policy(model, policy)
    audit(model, HALF, policy=policy).assert_clean()
    assert [upcast.path for upcast in audit(model, HALF).upcasts] == ["layers/1"]


def test_norm_layers_widen_on_purpose():
    model = linen.BatchNorm(use_running_average=False, dtype=jnp.float16)
    variables = model.init(jax.random.key(0), HALF)
    report = audit(functools.partial(model.apply, mutable=["batch_stats"]), variables, HALF)
    assert report.upcasts == ()


def test_the_backward_pass_names_no_upcast_of_its_own():
    def loss(w, x):
        return jnp.sum((x @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)

    audit(jax.grad(loss), WIDE, HALF, policy="mixed_float16").assert_clean()


# Against a policy


def test_weight_and_spectral_norm_are_norms_around_a_layer_of_the_policys_dtype():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs), nnx.SpectralNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
    )
    apply_policy(model, "mixed_float16")
    model(HALF)
    report = audit(model, HALF, policy="mixed_float16")
    report.assert_clean()
    products = [row for row in rows(report, "dot_general") if row[0].endswith("layer_instance")]
    assert products == [("layers/0/layer_instance", "float16", 1), ("layers/1/layer_instance", "float16", 1)]


def test_products_in_another_dtype_than_the_policys_are_named():
    report = audit(net("float32"), IMAGES.astype(jnp.float32), policy="mixed_float16")
    assert [(row.path, row.operation, row.dtype) for row in report.products] == [
        ("conv", "conv_general_dilated", F32),
        ("head", "dot_general", F32),
    ]
    assert audit(net("mixed_float16"), IMAGES, policy="mixed_bfloat16").products[0].dtype == F16


def test_rules_by_path_and_type_decide_what_a_product_should_run_in():
    policy = Policy("float32", "float16", "float32", rules={"type:Conv": "bfloat16", "head": "float32"})
    model = net(policy)
    audit(model, IMAGES, policy=policy).assert_clean()
    assert [row.path for row in audit(model, IMAGES, policy="mixed_float16").products] == ["conv", "head"]


def test_parameters_and_statistics_that_disobey_are_named_by_path():
    model = net("mixed_float16")
    model.head.kernel[...] = model.head.kernel[...].astype(jnp.float32)
    model.conv.kernel.set_value(model.conv.kernel[...].astype(jnp.float16))
    model.norm.var.set_value(model.norm.var[...].astype(jnp.float16))
    model.eval()
    report = audit(model, IMAGES, policy="mixed_float16")
    assert [(leaf.path, leaf.dtype, leaf.wanted) for leaf in report.disobeying] == [
        ("conv/kernel", F16, F32),
        ("norm/var", F16, F32),
    ]


def test_half_parameters_are_right_under_a_policy_that_stores_half_but_statistics_are_not():
    report = audit(net("float16"), IMAGES, policy="float16")
    report.assert_clean()
    assert {leaf.path: leaf.dtype for leaf in report.leaves}["norm/mean"] == F32
    assert {leaf.path: leaf.dtype for leaf in report.leaves}["conv/kernel"] == F16


def test_without_a_module_the_first_argument_holds_the_parameters():
    def fn(params, x):
        return x @ params["a"]["w"] + params["b"][None]

    params = {"a": {"w": jnp.ones((4, 3), jnp.float16)}, "b": jnp.ones(3, jnp.float16)}
    report = audit(fn, params, HALF, policy="mixed_float16")
    assert [leaf.path for leaf in report.disobeying] == ["args/0/a/w", "args/0/b"]
    stored = Policy("float16", "float16", rules={"a": "float32"})
    assert [leaf.path for leaf in audit(fn, params, HALF, policy=stored).disobeying] == ["args/0/a/w"]
    assert audit(fn, params, HALF, policy="mixed_float16", params=None).disobeying == ()
    assert [leaf.path for leaf in audit(fn, params, HALF, policy="mixed_float16", params=1).disobeying] == ["args/1"]


def test_models_among_the_arguments_are_found_and_share_what_they_shared():
    def fn(pair, x):
        return pair["first"](x) + pair["second"](x)

    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    apply_policy(layer, "mixed_float16")
    report = audit(fn, {"first": layer, "second": layer}, HALF, policy="mixed_float16")
    report.assert_clean()
    assert [leaf.path for leaf in report.leaves] == ["args/0/first/bias", "args/0/first/kernel", "args/1"]


def test_operations_of_the_float32_list_in_half_are_shown_but_no_fault():
    report = audit(jnp.exp, HALF, policy="mixed_float16", params=None)
    assert [(row.operation, row.dtype) for row in report.narrow] == [("exp", F16)]
    assert report.faults == []
    assert "(outside modules): 1 exp in float16" in str(report)


def test_half_stored_parameters_are_told_under_a_mixed_policy():
    def update(params, grads):
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = {"w": jnp.ones(3, jnp.bfloat16)}
    (leaf,) = audit(update, params, params, policy="mixed_bfloat16").disobeying
    assert (leaf.path, leaf.dtype, leaf.wanted) == ("args/0/w", BF16, F32)


# Weak types


def test_python_numbers_and_weak_arrays_that_would_compile_twice():
    report = audit(lambda x, a, b, train: (x * a, b * 2, train), HALF, 0.5, jnp.asarray(1.0), True)
    assert [(weak.path, weak.direction) for weak in report.weak_types] == [
        ("args/1", "argument"),
        ("args/2", "argument"),
        ("1", "result"),
    ]


def test_a_state_that_is_strong_from_birth_has_none():
    report = audit(lambda state: {"scale": state["scale"] * 2}, {"scale": jnp.asarray(1, jnp.float32)})
    assert report.weak_types == ()


# Other libraries


def test_linen_haiku_and_equinox_open_scopes_of_their_own():
    class Small(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, dtype=jnp.float16, name="out")(x)

    variables = Small().init(jax.random.key(0), HALF)
    report = audit(Small().apply, variables, HALF, policy="mixed_float16")
    report.assert_clean()
    assert rows(report, "dot_general") == [("Small/out", "float16", 1)]

    transformed = hk.transform(lambda x: hk.Linear(3, name="out")(x))  # noqa: PLW0108 (made inside)
    params = transformed.init(jax.random.key(0), HALF.astype(jnp.float32))
    assert [u.path for u in audit(transformed.apply, params, None, HALF).upcasts] == ["out"]

    layer = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    report = audit(lambda layer, x: jax.vmap(layer)(x), layer, HALF.astype(jnp.float32), policy="mixed_float16")
    assert [row.path for row in report.products] == ["eqx.nn.Linear"]
    assert report.leaves[0].path == "args/0/weight"


# How it is told


def test_an_assertion_lists_every_fault():
    with pytest.raises(AssertionError) as caught:
        audit(
            lambda w, x: x @ w, WIDE.astype(jnp.float16), HALF.astype(jnp.float32), policy="mixed_float16"
        ).assert_clean()
    told = str(caught.value).splitlines()
    assert told[0] == "3 faults:"
    assert told[1].startswith("(outside modules): float16 [4, 3] silently becomes float32 for dot_general, ")
    assert told[2] == "(outside modules): 1 dot_general in float32, which is not the policy's compute dtype"
    assert told[3] == "args/0: stored in float16, the policy says float32"


def test_it_prints_as_a_table_with_a_line_for_each_module():
    lines = str(audit(net("mixed_float16"), IMAGES, policy="mixed_float16")).splitlines()
    assert lines[0].split("  ")[0] == "module"
    assert [line.split()[0] for line in lines[1:5]] == ["conv", "norm", "(outside", "head"]
    assert re.match(r"conv +1 float16 +1 float32, 1 float16 +2 float16$", lines[1])
    assert lines[-1] == "no faults"


def test_json_has_everything_and_goes_to_a_file(tmp_path):
    report = audit(lambda x, w: x @ w, HALF, WIDE, policy="mixed_float16")
    text = report.to_json(tmp_path / "audit.json")
    told = json.loads((tmp_path / "audit.json").read_text())
    assert told == json.loads(text)
    assert told["policy"] == "params=float32,compute=float16,output=float32"
    assert told["operations"][-1] == {
        "path": "",
        "operation": "dot_general",
        "kind": "low",
        "dtype": "float32",
        "count": 1,
    }
    assert told["upcasts"][0]["from_dtype"] == "float16"
    assert len(told["faults"]) == 3


# Bad input


def test_what_cannot_be_called_is_refused():
    with pytest.raises(UsageError, match="audit takes a function or a Flax NNX module, got dict"):
        audit({"w": 1}, HALF)


def test_a_rule_that_matches_no_module_is_an_error():
    with pytest.raises(UsageError, match="rule 'haed' matches nothing; nearest: head"):
        audit(net("mixed_float16"), IMAGES, policy="mixed_float16;haed=float32")


# Residual networks as they are shipped; every model, in small, under every preset: models/test_precision_of_models.py

PRODUCTS = {"mlp": 3, "resnet18": 21, "resnet34": 37, "resnet50": 54}
QUICK = ("mlp", "resnet18")  # the others have the same blocks, more of them
DEEPER = {"resnet101", "resnet152"}  # a resnet50 with more of the same blocks, for minutes of tracing


def test_every_shipped_model_is_listed_here_or_where_it_is_made():
    """The families that came later: tests/models/test_precision_of_models.py."""
    later = {"resnext50", "wrn16_4", "wrn28_10", "xception", "convnext_t", "vit_ti16", "vit_s16", "vit_b16"}
    later |= {name for name in MODELS if name.startswith(("efficientnet", "mobilenet", "regnet", "densenet"))}
    later |= {*DIFFUSION_MODELS}
    assert set(PRODUCTS) | DEEPER == set(MODELS) - later - {"unet", "bert", "gpt2"}


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(name, preset, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, preset in zip(PRODUCTS, itertools.cycle(("mixed_float16", "O1")), strict=False)
    ],
)
def test_every_product_of_a_shipped_model_is_counted_and_clean(name, preset):
    policy, autocasting = get_policy(preset), preset == "O1"
    stored = storage_policy(policy) if autocasting else policy
    model = nnx.eval_shape(functools.partial(shipped, name, stored))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32 if autocasting else policy.compute_dtype)
    report = audit(autocast(call_model, policy) if autocasting else call_model, model, images, policy=policy)
    report.assert_clean()
    products = [row for row in report if row.kind == "low"]
    assert {row.dtype for row in products} == {np.dtype(policy.compute_dtype)}
    assert sum(row.count for row in products) == PRODUCTS[name]


def shipped(name: str, policy: Policy) -> nnx.Module:
    settings = Model(name=name, stem="small" if name == "mlp" else "imagenet", width=8)
    model = models.build_model(settings, fields=labelled_images(10, (32, 32, 3)), rngs=nnx.Rngs(0))
    apply_policy(model, policy)
    return model


def call_model(model, images):
    return model(images)
