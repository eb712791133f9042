"""apply_policy: dtypes on any Flax NNX model, float32 norms in training and evaluation, and a report that tells."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import DtypeError, UsageError
from mpjax.precision import Policy, apply_policy, check_dtypes, get_policy, modules_of, scope_policy, storage_policy


F16, BF16, F32 = np.dtype(jnp.float16), np.dtype(jnp.bfloat16), np.dtype(jnp.float32)


class Block(nnx.Module):
    """As a third party would write it: no dtype argument anywhere."""

    def __init__(self, width, rngs):
        self.conv = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.bn(self.conv(x))) + x


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.layers = nnx.List([Block(4, rngs), Block(4, rngs)])
        self.head = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 2, rngs=rngs))

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((1, 2)))


class GhostNorm(nnx.BatchNorm):
    """A subclass under another name."""


class Attention(nnx.Module):
    def __init__(self, rngs, **options):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs, **options)

    def __call__(self, x, mask=None):
        return self.attention(x, mask=mask)


def net():
    return Net(nnx.Rngs(0))


def images():
    return jnp.linspace(-1.0, 1.0, 96, dtype=jnp.float32).reshape(2, 4, 4, 3)


def rows(report):
    return {row.path: row for row in report}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def products(fn, *args):
    """The dtypes of what goes into the convolutions and matrix products of `fn`, in order."""
    found = []
    for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append({var.aval.dtype.name for var in eqn.invars})
    return found


def functional(model):
    """The model as a function of its state and its input, for tracing."""
    graph, state = nnx.split(model)

    def call(state, *args):
        return nnx.merge(graph, state)(*args)

    return call, state


def floating(model, kind):
    return {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, kind))}


# What every layer gets


def test_the_report_has_a_row_for_each_submodule_with_parameters_or_a_dtype():
    report = rows(apply_policy(net(), "mixed_float16"))
    assert report.keys() == {
        "stem", "layers/0/conv", "layers/0/bn", "layers/1/conv", "layers/1/bn", "head/layers/0", "head/layers/2"
    }  # fmt: skip
    assert report["stem"] == ("stem", "Conv", F32, F16, "policy")
    assert report["layers/1/bn"] == ("layers/1/bn", "BatchNorm", F32, F32, "type:norm")
    assert report["head/layers/2"] == ("head/layers/2", "Linear", F32, F16, "type:head")


def test_the_report_prints_as_a_table():
    report = apply_policy(nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)), "bfloat16")
    assert str(report).splitlines() == [
        "path      type    param_dtype  compute_dtype  rule",
        "--------  ------  -----------  -------------  ---------",
        "layers/0  Linear  bfloat16     bfloat16       type:head",
    ]


@pytest.mark.parametrize(
    ("policy", "param", "product", "output"),
    [
        ("float32", "float32", "float32", "float32"),
        ("mixed_float16", "float32", "float16", "float32"),
        ("mixed_bfloat16", "float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float16", "float32"),
        ("p=f16,c=f32,o=bf16", "float16", "float32", "bfloat16"),
    ],
)
def test_an_unedited_model_stores_computes_and_answers_in_the_policys_dtypes(policy, param, product, output):
    model = net()
    apply_policy(model, policy)
    call, state = functional(model)
    with jax.numpy_dtype_promotion("standard"):
        assert products(call, state, images()) == [{product}] * 5
        assert jax.eval_shape(call, state, images()).dtype == np.dtype(output)
    for path, value in nnx.to_flat_state(state):
        norm_or_statistics = "bn" in path
        assert value.get_value().dtype == np.dtype("float32" if norm_or_statistics else param), path


def test_what_enters_a_norm_is_cast_up_and_what_leaves_it_is_cast_down():
    seen = {}

    class Spy(nnx.LayerNorm):
        def __call__(self, x, *, shift=None):
            seen["in"] = (x.dtype, shift.dtype)
            return super().__call__(x + shift)

    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), Spy(2, rngs=nnx.Rngs(0)))
    apply_policy(model, "mixed_float16")
    linear, norm = model.layers
    x = linear(jnp.ones((1, 2), jnp.float32))
    assert (x.dtype, norm(x, shift=x).dtype) == (F16, F16)
    assert seen == {"in": (F32, F32)}


IMAGE, VECTOR, SEQUENCE = (1, 4, 4, 4), (1, 4), (1, 3, 8)

LAYERS = {  # how to make one, its input's shape, how many matrix products or convolutions it holds
    "conv": (lambda rngs: nnx.Conv(4, 4, (3, 3), strides=2, rngs=rngs), IMAGE, 1),
    "grouped": (lambda rngs: nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs), IMAGE, 1),
    "transposed": (lambda rngs: nnx.ConvTranspose(4, 2, (2, 2), strides=(2, 2), rngs=rngs), IMAGE, 1),
    "linear": (lambda rngs: nnx.Linear(4, 2, rngs=rngs), VECTOR, 1),
    "general": (lambda rngs: nnx.LinearGeneral(4, (2, 2), rngs=rngs), VECTOR, 1),
    "einsum": (lambda rngs: nnx.Einsum("ab,bc->ac", (4, 2), (2,), rngs=rngs), VECTOR, 1),
    "embed": (lambda rngs: nnx.Embed(5, 4, rngs=rngs), None, 0),
    "attention": (Attention, SEQUENCE, 6),
    "lora": (lambda rngs: nnx.LoRA(4, 2, 4, rngs=rngs), VECTOR, 2),
    "lstm": (lambda rngs: nnx.RNN(nnx.LSTMCell(8, 4, rngs=rngs)), SEQUENCE, 8),
    "optimized lstm": (lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(8, 4, rngs=rngs)), SEQUENCE, 2),
    "gru": (lambda rngs: nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)), SEQUENCE, 2),
}

NORMS = {
    "batch": lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
    "layer": lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
    "group": lambda: nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0)),
    "rms": lambda: nnx.RMSNorm(4, rngs=nnx.Rngs(0)),
    "instance": lambda: nnx.InstanceNorm(4, rngs=nnx.Rngs(0)),
    "ghost": lambda: GhostNorm(4, rngs=nnx.Rngs(0)),
}


def abstract_input(shape):
    """Tracing needs no more than this; None stands for the numbers of words."""
    return jax.ShapeDtypeStruct((1, 3), jnp.int32) if shape is None else jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_computes_in_half_and_answers_in_the_output_dtype(name):
    make, shape, count = LAYERS[name]
    model, x = nnx.eval_shape(lambda: make(nnx.Rngs(0))), abstract_input(shape)
    apply_policy(model, "float16")
    call, state = functional(model)
    with jax.numpy_dtype_promotion("standard"):
        found = products(call, state, x)
        out = jax.eval_shape(call, state, x)
    assert found == [{"float16"}] * count
    assert out.dtype == F32
    assert floating(model, nnx.Param) == {F16}


def test_a_sole_norm_layer_is_a_model_too():
    model = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    assert apply_policy(model, "p=f32,c=f16,o=bf16")[0] == ("", "LayerNorm", F32, F32, "type:norm")
    assert model(jnp.ones((1, 4), jnp.float16)).dtype == BF16


def test_a_cell_starts_its_carry_in_the_dtype_of_its_parameters():
    model = nnx.RNN(nnx.LSTMCell(8, 4, rngs=nnx.Rngs(0)))
    apply_policy(model, "float16")
    assert [part.dtype for part in model.cell.initialize_carry((1, 8), nnx.Rngs(0))] == [F16, F16]


class Gated(nnx.Module):
    """A module without a parameter, called with values of several dtypes: the dtypes of its results by the second."""

    class Gate(nnx.Module):
        def __call__(self, x, gate):
            self.computed = x.dtype, gate.dtype
            return x * gate.astype(x.dtype)

    def __init__(self):
        self.gate = self.Gate()

    def __call__(self, x):
        return {str(other): self.gate(x, x.astype(other)).dtype for other in (BF16, F16, F32)}


def test_a_rule_casts_the_inputs_of_a_module_without_parameters():
    model = Gated()
    report = rows(apply_policy(model, Policy("float32", "bfloat16", rules={"gate": "float32"})))
    assert report["gate"] == ("gate", "Gate", None, F32, "gate")
    model(jnp.ones(2, BF16))
    assert model.gate.computed == (F32, F32)


@pytest.mark.parametrize(("pattern", "dtype"), [("*", F32), ("gate", BF16), ("type:Gate", BF16)])
def test_a_rule_in_half_precision_casts_a_module_without_parameters_only_if_it_names_it(pattern, dtype):
    """Its inputs may be positions, which half precision rounds."""
    model = Gated()
    apply_policy(model, Policy("float32", "float32", rules={pattern: "bfloat16"}))
    model(jnp.ones(2, F32))
    assert model.gate.computed == (dtype, dtype)


def test_an_output_of_a_ruled_module_is_not_rounded_to_the_narrowest_of_its_inputs():
    model = Gated()
    apply_policy(model, Policy("float32", "float16", rules={"gate": "float32"}))
    assert model(jnp.ones(2, BF16)) == {"bfloat16": BF16, "float16": F32, "float32": F32}


def test_integer_inputs_and_outputs_are_left_alone():
    class Labels(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(4096, 2, rngs=rngs)

        def __call__(self, words, names):
            return {"out": self.embed(words), "words": words, "names": names, "none": None}

    model = Labels(nnx.Rngs(0))
    apply_policy(model, "mixed_float16")
    out = model(jnp.array([2049]), names="cat")
    assert (out["out"].dtype, out["words"].dtype, int(out["words"][0])) == (F32, jnp.int32, 2049)
    assert (out["names"], out["none"]) == ("cat", None)


def test_parameters_in_containers_are_cast_too():
    class Holder(nnx.Pytree):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    class Model(nnx.Module):
        def __init__(self):
            self.list = nnx.List([nnx.Param(jnp.ones(2))])
            self.dict = nnx.data({"scale": nnx.Param(jnp.ones(2)), "mean": nnx.BatchStat(jnp.ones(2))})
            self.holder = Holder()
            self.count = nnx.Param(jnp.arange(2))
            self.cache = nnx.Cache(jnp.ones(2))

    model = Model()
    report = rows(apply_policy(model, "bfloat16"))
    assert model.list[0].get_value().dtype == BF16
    assert model.dict["scale"].get_value().dtype == BF16
    assert model.dict["mean"].get_value().dtype == F32
    assert model.holder.w.get_value().dtype == BF16
    assert model.count.get_value().dtype == jnp.int32
    assert model.cache.get_value().dtype == F32  # neither a parameter nor a statistic
    assert (report[""].param_dtype, report[""].compute_dtype) == (BF16, None)


def test_a_model_without_a_call_stays_without():
    class Towers(nnx.Module):
        def __init__(self, rngs):
            self.image = nnx.Linear(2, 2, rngs=rngs)

    model = Towers(nnx.Rngs(0))
    apply_policy(model, "mixed_float16")
    assert not callable(model)
    assert model.image(jnp.ones((1, 2), jnp.float32)).dtype == F16


def test_shared_submodules_are_set_once():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encode = nnx.Linear(2, 2, rngs=rngs)
            self.decode = self.encode

        def __call__(self, x):
            return self.decode(self.encode(x))

    model = Tied(nnx.Rngs(0))
    assert [row.path for row in apply_policy(model, "float16")] in (["encode"], ["decode"])
    assert model.encode is model.decode
    assert model(jnp.ones((1, 2), jnp.float32)).dtype == F32
    assert floating(model, nnx.Param) == {F16}


# Norms


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_every_norm_computes_in_float32_and_rounds_its_output_only(name, training):
    x = jnp.linspace(-3.0, 6.0, 128, dtype=jnp.float32).reshape(2, 4, 4, 4).astype(jnp.float16)
    outputs = []
    for policy in (None, "mixed_float16", "float16"):
        model = nnx.Sequential(NORMS[name]())
        norm = model.layers[0]
        norm.scale.set_value(jnp.full(4, 2049.0, jnp.float32))  # 2048 in float16
        if hasattr(norm, "bias"):
            norm.bias.set_value(jnp.full(4, -2047.0, jnp.float32))
        if policy:
            report = rows(apply_policy(model, policy))
            assert report["layers/0"][2:] == (F32, F32, "type:norm")
        (model.train if training else model.eval)()
        with jax.numpy_rank_promotion("allow"):
            outputs.append(np.asarray(norm(x.astype(jnp.float32) if policy is None else x)))
    assert [output.dtype for output in outputs] == [F32, F16, F16]
    np.testing.assert_array_equal(outputs[1], outputs[0].astype(np.float16))
    np.testing.assert_array_equal(outputs[2], outputs[1])
    assert np.isfinite(outputs[1]).all()


@pytest.mark.parametrize("cls", [nnx.BatchNorm, GhostNorm])
@pytest.mark.parametrize(
    ("features", "epsilon", "variance", "expected"),
    [
        ([300.0, -300.0, 600.0, 0.0], 1e-5, 112500.0, [0.447, -1.342, 1.342, -0.447]),
        ([1e-4, 2e-4, 3e-4, 4e-4], 1e-8, 1.25e-8, [-1.0, -0.333, 0.333, 1.0]),
    ],
)
def test_batch_norm_evaluates_right_with_variances_float16_cannot_hold(cls, features, epsilon, variance, expected):
    model = nnx.Sequential(cls(1, momentum=0.0, epsilon=epsilon, rngs=nnx.Rngs(0)))
    apply_policy(model, "mixed_float16")
    x = jnp.array(features, jnp.float32)[:, None].astype(jnp.float16)
    model.train()
    trained = model(x)
    np.testing.assert_allclose(model.layers[0].var.get_value(), [variance], rtol=2e-3)
    model.eval()
    for output in (trained, model(x)):
        np.testing.assert_allclose(output[:, 0], expected, atol=2e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "mixed_bfloat16"])
def test_features_of_200_over_224x224_keep_their_statistics(policy):
    model = nnx.BatchNorm(2, momentum=0.0, use_fast_variance=False, rngs=nnx.Rngs(0))
    apply_policy(model, policy)
    half = jnp.tile(jnp.array([[199.0, 200.0], [201.0, 200.0]], jnp.float16), (112, 224, 1)).reshape(1, 224, 224, 2)
    assert np.isfinite(model(half)).all()
    np.testing.assert_allclose(model.mean.get_value(), [200.0, 200.0], rtol=1e-3)
    np.testing.assert_allclose(model.var.get_value(), [1.0, 0.0], atol=1e-3)
    check_dtypes(nnx.state(model), "float32")


def test_norms_of_zeros_give_zeros_and_move_no_scale():
    for make in NORMS.values():
        norm = make()
        apply_policy(norm, "mixed_float16")
        with jax.numpy_rank_promotion("allow"):
            output, grads = nnx.value_and_grad(lambda norm, x: norm(x).sum())(norm, jnp.zeros((2, 4, 4, 4), F16))
        assert output == 0.0
        assert grads["scale"].get_value().tolist() == [0.0] * 4


def test_o3_takes_norms_to_half_too_but_keeps_statistics_in_float32():
    model = nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    assert apply_policy(model, "O3")[0] == ("layers/0", "BatchNorm", F16, F16, "type:norm")
    with jax.numpy_dtype_promotion("standard"):
        assert model(jnp.ones((1, 2), jnp.float32)).dtype == F16
    assert floating(model, nnx.BatchStat) == {F32}


# Attention


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_fully_masked_row_gives_finite_output_and_gradients(policy):
    model = Attention(nnx.Rngs(0))
    apply_policy(model, policy)
    call, state = functional(model)
    x, mask = jnp.ones((1, 3, 8), jnp.float32), jnp.zeros((1, 2, 3, 3), bool)
    out, gradient = jax.jit(jax.value_and_grad(lambda x: call(state, x, mask).sum()))(x)
    assert np.isfinite(out)
    assert np.isfinite(gradient).all()


def test_softmax_of_attention_is_float32():
    model = Attention(nnx.Rngs(0))
    apply_policy(model, "mixed_float16")
    jaxpr = jax.make_jaxpr(functional(model)[0])(nnx.state(model), jnp.ones((1, 3, 8), jnp.float32)).jaxpr
    assert {eqn.invars[0].aval.dtype for eqn in equations(jaxpr) if eqn.primitive.name in ("exp", "reduce_sum")} == {
        F32
    }


# Rules


def test_rules_by_path_subtree_type_and_policy():
    policy = Policy(
        "float32",
        "float16",
        "float32",
        rules={
            "stem": "float32",
            "layers/1/*": "bfloat16",
            "head/layers/2": Policy("float16", "float32", "bfloat16"),
            "type:Linear": "float32",
        },
    )
    model = net()
    report = rows(apply_policy(model, policy))
    assert report["stem"][2:] == (F32, F32, "stem")
    assert report["layers/0/conv"][2:] == (F32, F16, "policy")
    assert report["layers/0/bn"][2:] == (F32, F32, "type:norm")
    assert report["layers/1/conv"][2:] == (F32, BF16, "layers/1/*")
    assert report["layers/1/bn"][2:] == (F32, BF16, "layers/1/*")
    assert report["head/layers/0"][2:] == (F32, F32, "type:Linear")
    assert report["head/layers/2"][2:] == (F16, F32, "head/layers/2")
    assert model.head.layers[2](jnp.ones((1, 4), jnp.float32)).dtype == BF16
    call, state = functional(model)
    with jax.numpy_dtype_promotion("standard"):
        assert [kinds.pop() for kinds in products(call, state, images())] == [
            "float32", "float16", "bfloat16", "float32", "float32"
        ]  # fmt: skip


def test_a_rule_on_a_parent_covers_all_that_it_holds():
    report = rows(apply_policy(net(), "mixed_float16;layers=float32;type:Sequential=bfloat16"))
    assert {path for path, row in report.items() if row.rule == "layers"} == {
        "layers/0/conv", "layers/0/bn", "layers/1/conv", "layers/1/bn"
    }  # fmt: skip
    assert {path for path, row in report.items() if row.rule == "type:Sequential"} == {"head/layers/0", "head/layers/2"}


def test_a_dtype_rule_stores_parameters_no_narrower_than_it_computes():
    model = net()
    report = rows(apply_policy(model, "bfloat16;head/layers/2=float32;stem=float16"))
    assert report["head/layers/2"][2:4] == (F32, F32)
    assert report["stem"][2:4] == (F32, F16)  # the narrowest that holds bfloat16 and float16
    assert report["head/layers/0"][2:4] == (BF16, BF16)
    assert model.head.layers[2].kernel.get_value().dtype == F32


def test_the_rule_for_norms_can_be_overridden():
    report = rows(apply_policy(net(), "mixed_float16;layers/0/bn=float16;type:norm=bfloat16"))
    assert report["layers/0/bn"][3:] == (F16, "layers/0/bn")
    assert report["layers/1/bn"][3:] == (BF16, "type:norm")


def test_a_rule_that_matches_nothing_changes_nothing_and_names_the_nearest_paths():
    model = net()
    with pytest.raises(UsageError, match="rule 'layers/2/conv' matches nothing; nearest: layers/1/conv, layers/0/conv"):
        apply_policy(model, "float16;layers/2/conv=float32")
    assert floating(model, nnx.Param) == {F32}
    assert type(model) is Net


def test_a_rule_behind_one_that_covers_it_is_an_error():
    with pytest.raises(UsageError, match=r"'layers/0' decides nothing: .* before it \('layers/\*'\) .*; put it first"):
        apply_policy(net(), "mixed_float16;layers/*=float32;layers/0=float16")


@pytest.mark.parametrize(
    "policy", ["float64", "p=f32,c=f32,o=f64", "mixed_float16;stem=float64", "float32;stem=p=f32,c=f32,o=f64"]
)
def test_float64_needs_64_bit_jax(policy):
    model = net()
    with pytest.raises(UsageError, match="jax_enable_x64"):
        apply_policy(model, policy)
    assert floating(model, nnx.Param) == {F32}


def test_float64_with_64_bit_jax():
    with jax.enable_x64(True):
        model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.LayerNorm(2, rngs=nnx.Rngs(0)))
        assert [row[2:4] for row in apply_policy(model, "float64")] == [(np.float64, np.float64)] * 2
        with jax.numpy_dtype_promotion("standard"):
            assert model(jnp.ones((1, 2), jnp.float32)).dtype == np.float64


@pytest.mark.parametrize("thing", [None, {"w": 1}, nnx.Linear, jnp.ones(1)])
def test_something_that_is_no_nnx_module_is_an_error(thing):
    with pytest.raises(UsageError, match="apply_policy takes a Flax NNX module, got"):
        apply_policy(thing, "float32")


# Modules of the user's own, without a dtype


class Mid(nnx.Module):
    """An RMS norm of 300 x, whose squares pass 65,504: zeros in float16, ones in float32 where x is ones."""

    def __init__(self, kind=nnx.Param):
        self.scale = kind(jnp.ones((1, 2), jnp.float32))

    def __call__(self, x):
        x = x * 300
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        return y * self.scale[...].astype(x.dtype)


class Outer(nnx.Module):
    """Has its own operations in half precision around those of `inner`."""

    def __init__(self):
        self.inner = Mid()

    def __call__(self, x):
        return self.inner(x * 300 * 300 / 90000)


class Around(nnx.Module):
    """`mid` between two layers, with a shortcut, which needs the dtype around it."""

    def __init__(self, mid):
        self.a = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.mid = mid
        self.b = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = self.a(x)
        return self.b(x + self.mid(x))


def statistics_only():
    return Mid(nnx.BatchStat)


def half_ones():
    return jnp.ones((1, 2), jnp.float16)


def cache_only():
    return Mid(nnx.Cache)


@pytest.mark.parametrize("make", [Mid, statistics_only, cache_only, Outer])
@pytest.mark.parametrize("rule", ["mid", "m?d*", "type:{}"])
def test_a_rule_casts_what_enters_and_leaves_a_module_with_variables_and_no_dtype(make, rule):
    model = Around(make())
    rule = rule.format(type(model.mid).__name__)
    report = apply_policy(model, f"mixed_float16;{rule}=float32")
    assert [(row.compute_dtype, row.rule) for row in report if row.path == "mid"] == [(F32, rule)]
    assert model.mid(half_ones()).dtype == F16
    assert model.mid(half_ones()).tolist() == [[1.0, 1.0]]
    assert model(jnp.ones((1, 2))).dtype == F32
    assert report.notes == ()


def test_a_half_rule_casts_down_and_a_rule_written_out_says_its_output():
    model = Around(Mid())
    ones = jnp.ones((1, 2), jnp.float32)
    report = rows(apply_policy(model, "float32;mid=float16"))
    assert report["mid"][2:] == (F32, F16, "mid")
    assert (model.mid(ones).dtype, model.mid(ones).tolist()) == (F32, [[0.0, 0.0]])
    apply_policy(model, "mixed_float16;mid=params=float32,compute=float32,output=bfloat16")
    assert (model.mid(ones).dtype, model.mid(ones).tolist()) == (BF16, [[1.0, 1.0]])


def test_only_a_rule_of_the_user_casts_and_the_next_policy_takes_it_back():
    model, plain = Around(Mid()), Around(Mid())
    apply_policy(model, "mixed_float16;mid=float32")
    assert rows(apply_policy(model, "mixed_float16"))["mid"][2:] == (F32, None, "policy")
    apply_policy(plain, "mixed_float16")
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    assert model.mid(half_ones()).tolist() == [[0.0, 0.0]]


def test_a_rule_for_a_recipe_leaves_the_dtypes_of_a_module_without_a_product_alone():
    model = Around(Mid())
    assert rows(apply_policy(model, Policy("float32", "bfloat16", rules={"*": "float8"})))["mid"].compute_dtype is None
    assert model.mid(jnp.ones((1, 2), jnp.float32)).dtype == F32


class Head(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.full((2, 3), 300.0))

    def __call__(self, x):
        return x @ self.kernel[...].astype(x.dtype)


def test_a_head_of_ones_own_that_a_rule_keeps_in_float32_does_not_round_its_logits():
    model = nnx.Dict(head=Head())
    apply_policy(model, "mixed_float16;head=float32")
    assert model.head(300 * half_ones()).tolist() == [[180_000.0] * 3]


def test_a_rule_leaves_the_operations_of_a_module_alone_whose_submodules_have_dtypes():
    model = Holder(Around(Mid()))
    model.quantiser.scale = nnx.Param(jnp.ones(2))
    report = rows(apply_policy(model, "mixed_float16;quantiser=bfloat16"))
    assert report["quantiser"].compute_dtype is None


def test_a_rule_for_variables_without_a_call_is_told_that_it_changes_no_computation():
    class Scale(nnx.Module):
        def __init__(self):
            self.value = nnx.Param(jnp.ones(2))

    report = apply_policy(Holder(Scale()), "mixed_float16;quantiser=float32")
    assert report.notes == (
        "rule 'quantiser' does not change what quantiser computes: Scale has no dtype and no __call__; cast in the "
        "code that uses it, as in x.astype(jnp.float32)",
    )
    assert rows(report)["quantiser"][2:] == (F32, None, "quantiser")


def test_a_module_in_two_places_is_cast_in_both_and_a_pickled_copy_too():
    model = Around(Mid())
    model.again = model.mid
    first = "mid" if "mid" in modules_of(model) else "again"
    apply_policy(model, f"mixed_float16;{first}=float32")
    for mid in (model.mid, model.again, pickle.loads(pickle.dumps(model.mid))):
        np.testing.assert_allclose(mid(half_ones()), 1, rtol=1e-6)


# True no-ops, repeats, and other lives of a model


@pytest.mark.parametrize("name", ["net", *LAYERS, *NORMS])
def test_float32_gives_the_same_program_as_the_plain_model(name):
    kinds = {
        "net": (Net, (2, 4, 4, 3)),
        **{kind: LAYERS[kind][:2] for kind in LAYERS},
        **{kind: (lambda rngs, kind=kind: NORMS[kind](), (2, 4, 4, 4)) for kind in NORMS},
    }
    make, shape = kinds[name]
    programs = []
    for policy in (None, "float32"):
        model, x = nnx.eval_shape(lambda: make(nnx.Rngs(0))), abstract_input(shape)
        if policy:
            apply_policy(model, policy)
        call, state = functional(model)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            programs.append(str(jax.make_jaxpr(call)(state, x)))
    assert programs[0] == programs[1]


def test_a_later_policy_replaces_an_earlier_one():
    once, twice = net(), net()
    apply_policy(twice, "p=f32,c=f16,o=bf16;stem=bfloat16;head=p=f32,c=bf16,o=f16")
    report = apply_policy(twice, "mixed_bfloat16")
    assert report == apply_policy(once, "mixed_bfloat16")
    assert nnx.graphdef(once) == nnx.graphdef(twice)
    apply_policy(twice, "float32")
    apply_policy(once, "float32")
    assert nnx.graphdef(once) == nnx.graphdef(twice)
    assert type(twice.head.layers[0]) is nnx.Linear


def test_equal_models_have_equal_graph_definitions_so_that_a_step_compiles_once():
    first, second = net(), net()
    apply_policy(first, "mixed_float16")
    apply_policy(second, "mixed_float16")
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert hash(nnx.graphdef(first)) == hash(nnx.graphdef(second))


@pytest.mark.parametrize(
    "again",
    [lambda m: nnx.merge(*nnx.split(m)), nnx.clone, copy.deepcopy, lambda m: nnx.merge(nnx.graphdef(m), nnx.state(m))],
    ids=["split and merge", "clone", "deepcopy", "graphdef and state"],
)
def test_the_policy_survives_another_life_of_the_model(again):
    model = net()
    apply_policy(model, "p=f32,c=f16,o=bf16")
    other = again(model)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(other(images()), model(images()))
        assert other(images()).dtype == BF16
    assert isinstance(other, Net)
    assert isinstance(other.layers[0].bn, nnx.BatchNorm)
    assert (type(other).__name__, type(other).__module__) == (Net.__name__, Net.__module__)


def test_an_abstract_model_gets_the_dtypes_a_concrete_one_would():
    abstract, concrete = nnx.eval_shape(net), net()
    assert apply_policy(abstract, "float16") == apply_policy(concrete, "float16")
    assert nnx.graphdef(abstract) == nnx.graphdef(concrete)
    for shape, value in zip(jax.tree.leaves(nnx.state(abstract)), jax.tree.leaves(nnx.state(concrete)), strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (shape.shape, shape.dtype) == (value.shape, value.dtype)


def test_a_model_built_and_set_inside_jit_equals_one_outside():
    def build():
        model = net()
        apply_policy(model, "bfloat16")
        return nnx.state(model, nnx.Param)

    inside, outside = jax.jit(build)(), build()
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2, atol=1e-6)


def test_keyword_and_default_arguments_of_a_layer_still_work():
    model = nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    apply_policy(model, "mixed_float16")
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float16)
    mask = jnp.array([[True], [False]])
    model.layers[0](x, use_running_average=False, mask=mask)
    np.testing.assert_allclose(model.layers[0].mean.get_value(), [0.01, 0.02], rtol=1e-5)


def test_gradients_of_float32_parameters_are_float32():
    model = net()
    apply_policy(model, "mixed_float16")
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return nnx.merge(graph, params, rest, copy=True)(images()).sum()

    with jax.numpy_dtype_promotion("standard"):
        check_dtypes(jax.eval_shape(jax.grad(loss), params), "float32", name="gradients")


class OwnDtype(nnx.Module):
    """A module whose dtype is its own affair."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))

    @property
    def dtype(self):
        return self.weight.get_value().dtype


def test_a_dtype_that_is_computed_is_left_alone():
    model = OwnDtype()
    (row,) = apply_policy(model, "float16")
    assert (row.param_dtype, row.compute_dtype) == (jnp.float16, None)
    assert model.dtype == jnp.float16


# Beside autocast


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        ("mixed_float16", "params=float32,compute=float32,output=float32"),
        ("bfloat16", "params=bfloat16,compute=float32,output=float32"),
        ("float64", "params=float64,compute=float64,output=float64"),
        ("p=f32,c=f16,o=bf16", "params=float32,compute=float32,output=bfloat16"),
        (
            "bfloat16;stem=float32;head=float16;layers/0=p=f16,c=f16,o=f16",
            "params=bfloat16,compute=float32,output=float32;"
            "stem=params=float32,compute=float32,output=float32;"
            "head=params=float32,compute=float32,output=float32;"
            "layers/0=params=float16,compute=float32,output=float32",
        ),
    ],
)
def test_a_storage_policy_stores_as_the_policy_and_casts_nothing_down(policy, stored):
    assert str(storage_policy(get_policy(policy))) == stored


def test_a_model_under_a_storage_policy_keeps_its_parameters_and_computes_in_float32():
    model = net()
    apply_policy(model, storage_policy(get_policy("bfloat16;stem=float32")))
    assert model.layers[0].conv.kernel.get_value().dtype == BF16
    assert {model.stem.kernel.get_value().dtype, model.layers[0].bn.scale.get_value().dtype} == {F32}
    model.eval()
    jaxpr = jax.make_jaxpr(model)(images())
    products = [e for e in jaxpr.eqns if e.primitive.name in ("conv_general_dilated", "dot_general")]
    assert len(products) == 5
    assert {e.outvars[0].aval.dtype for e in products} == {F32}


def test_a_scope_policy_has_the_paths_of_its_types():
    policy = get_policy("mixed_float16;head/*=float32;type:Conv=bfloat16;type:Linear=float32;type:norm=float32")
    with pytest.raises(UsageError, match="'type:Linear' decides nothing"):
        apply_policy(net(), policy)
    policy = get_policy("mixed_float16;layers/1=float32;type:Conv=bfloat16;type:norm=float32")
    assert str(scope_policy(net(), policy)) == (
        "params=float32,compute=float16,output=float32;"
        "layers/1=float32;layers/0/conv=bfloat16;stem=bfloat16;layers/0/bn=float32"
    )


def test_a_scope_policy_for_a_model_without_an_inner_large_layer_is_an_error():
    layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(0)) for _ in range(4)])
    with pytest.raises(UsageError, match="no layer multiplies in float8: type:first_or_last, type:small_pro"):
        scope_policy(layers, get_policy("mixed_float8"))
    scope_policy(layers, get_policy("mixed_float8;*=bfloat16"))  # taken out by the user


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(4, 2, rngs=nnx.Rngs(0))
        self.heads = nnx.List([self.embed])

    def __call__(self, tokens):
        return self.heads[0].attend(self.embed(tokens))


@pytest.mark.parametrize("rule", ["heads/0", "heads/*"])
def test_a_rule_for_the_second_name_of_a_module_is_told_the_first(rule):
    with pytest.raises(UsageError, match="'heads/0' is the module 'embed', which has one dtype; write 'embed'"):
        apply_policy(Tied(), f"mixed_float16;{rule}=float32")


@pytest.mark.parametrize("held", [jnp.int8, "symmetric", lambda: None, 8])
def test_a_dtype_that_is_no_floating_dtype_is_left_alone_and_reported(held):
    class Quantiser(nnx.Module):
        def __init__(self):
            self.dtype = held
            self.inner = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    model = Quantiser()
    report = apply_policy(Holder(model), "mixed_float16")
    assert model.dtype is held
    assert report.notes == (f"quantiser.dtype is {held!r}, which is not a floating dtype to compute in: left as it is",)
    assert str(report).endswith(report.notes[0])


class Holder(nnx.Module):
    def __init__(self, quantiser):
        self.quantiser = quantiser


def test_a_dtype_that_is_a_method_is_left_alone():
    class Asked(nnx.Module):
        def dtype(self):
            return "mine"

    model = Asked()
    apply_policy(model, "mixed_float16")
    assert model.dtype() == "mine"


def called(model, x):
    return model(x)


@pytest.mark.parametrize(
    ("cell", "policy"),
    [
        (nnx.SimpleCell, "bfloat16"),
        (nnx.LSTMCell, "mixed_float16"),
        (nnx.OptimizedLSTMCell, "bfloat16"),
        (nnx.GRUCell, "mixed_float16"),
    ],
)
def test_a_recurrent_network_runs_and_its_carry_keeps_its_dtype(cell, policy):
    net = nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
    x = np.linspace(-1, 1, 30, dtype=np.float32).reshape(2, 5, 3)
    _, wanted = nnx.jit(called)(net, x)
    apply_policy(net, policy)
    with jax.numpy_dtype_promotion("standard"):  # Flax's cells promote
        carry, outputs = nnx.jit(called)(net, x)
    np.testing.assert_allclose(np.asarray(outputs, np.float32), wanted, atol=0.02)
    assert {leaf.dtype for leaf in jax.tree.leaves(carry)} == {outputs.dtype}  # the root's output dtype


@pytest.mark.parametrize(
    ("policy", "cache_first"), [("mixed_float16", True), ("mixed_bfloat16", False), ("float32", True)]
)
def test_attention_decodes_as_in_float32_with_a_cache_in_the_compute_dtype(policy, cache_first):
    def attention():
        return nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))

    plain, ours = attention(), attention()
    steps = [lambda: ours.init_cache((2, 3, 8)), lambda: apply_policy(ours, policy)]
    for step in steps if cache_first else reversed(steps):
        step()
    plain.init_cache((2, 3, 8))
    by_policy, by_flax = nnx.jit(called), nnx.jit(called)
    for token in np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 2, 1, 8):
        np.testing.assert_allclose(np.asarray(by_policy(ours, token), np.float32), by_flax(plain, token), atol=0.02)
    assert ours.cached_key[...].dtype == ours.cached_value[...].dtype == ours.dtype


def test_a_scan_whose_carry_changes_its_dtype_is_told_what_to_write():
    class Scanned(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = make(nnx.Rngs(0).split(3) if hasattr(nnx.Rngs, "split") else nnx.Rngs(0).fork(split=3))
            self.cast = False

        def __call__(self, x):
            x = x.astype(self.layers.dtype) if self.cast else x
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model = Scanned()
    apply_policy(model, "mixed_float16")
    with pytest.raises(
        DtypeError, match=r"Scanned: .* float32\[2,4\] .* float16\[2,4\].* Cast the carry before the loop, as in x ="
    ):
        model(jnp.ones((2, 4)))
    model.cast = True
    assert model(jnp.ones((2, 4))).dtype == jnp.float32
