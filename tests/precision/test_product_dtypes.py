"""What a policy asks of products, by module path."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision import AskedDtypes, Policy, PolicyForModules, apply_policy, audit, get_policy
from mpjax.precision.float8 import FLOAT8, ROWWISE


BF16 = jnp.dtype("bfloat16")


class Net(nnx.Module):
    """A list of three layers of 64, the second one of which is small, between an own product and a head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        sizes = [(64, 64), (64, 32), (32, 64), (64, 64), (64, 64)]
        self.blocks = nnx.List([nnx.Dict(linear=nnx.Linear(*size, rngs=rngs)) for size in sizes])
        self.head = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block["linear"](x)
        return self.head(x)


def test_without_a_policy_nothing_is_asked_for():
    assert PolicyForModules(None, {})("blocks/0") is None


def test_large_linear_layers_are_to_be_in_float8_and_others_are_not():
    of = PolicyForModules(get_policy("mixed_float8"), {"": Net()})
    assert of("blocks/0/linear") == AskedDtypes(BF16, FLOAT8, required=True)
    assert of("blocks/1/linear") == AskedDtypes(BF16, refused=True)
    assert of("head") == AskedDtypes(BF16, refused=True)
    assert of("blocks") == AskedDtypes(BF16, FLOAT8)
    assert of("blocks/0/linear").accepted == {jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")}
    assert of("head").accepted == {BF16}
    assert of("blocks").accepted == {BF16, jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")}


def test_a_small_layer_may_be_in_float8_where_no_rule_takes_it_out():
    of = PolicyForModules(Policy("float32", "bfloat16", products=FLOAT8), {"": Net()})
    assert of("blocks/1/linear") == AskedDtypes(BF16, FLOAT8)
    assert of("head") == AskedDtypes(BF16, refused=True)  # 3 is no multiple of 16


def test_the_recipe_that_a_layer_was_made_to_multiply_by_is_known():
    model = Net()
    apply_policy(model, "mixed_float8_rowwise")
    assert PolicyForModules(get_policy("mixed_float8"), {"": model})("blocks/0/linear").applied == ROWWISE
    assert PolicyForModules(get_policy("mixed_bfloat16"), {"": model})("blocks/0/linear").refused


@pytest.mark.parametrize("function", [None, functools.partial(jax.lax.conv_general_dilated)])
def test_a_convolution_has_a_product_of_the_users_own_if_it_was_given_one(function):
    given = {"conv_general_dilated": function} if function else {}
    model = nnx.Conv(1, 1, (3,), **given, rngs=nnx.Rngs(0))
    assert PolicyForModules(get_policy("float32"), {"": model})("").users_product is (function is not None)
    assert not PolicyForModules(get_policy("float32"), {"": nnx.Einsum("ab,bc->ac", (2, 2), rngs=nnx.Rngs(0))})(
        ""
    ).users_product


def test_a_layer_with_a_product_of_the_users_own_is_told():
    model = nnx.List([nnx.Linear(64, 64, dot_general=lambda *args, **more: None, rngs=nnx.Rngs(0))])
    assert PolicyForModules(get_policy("mixed_float8"), {"": model})("0").users_product


class Pair(nnx.Module):
    """Two layers and a head; the kind and the width of the first one are given."""

    def __init__(self, kind, width=64):
        self.first = kind(64, width, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(width, 64, rngs=nnx.Rngs(0))
        self.third = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.third(self.second(self.first(x))))


@pytest.mark.parametrize("kinds", [(nnx.LinearGeneral, nnx.Linear), (nnx.Linear, nnx.LinearGeneral)])
def test_where_modules_of_two_models_with_one_path_differ_nothing_is_asked_for(kinds):
    models = dict(enumerate(map(Pair, kinds)))
    of = PolicyForModules(get_policy("mixed_bfloat16;type:LinearGeneral=float32"), models)
    assert of("first") is None
    assert of("third") == AskedDtypes(BF16, refused=True)
    of.require_rules({"first", "third"})


@pytest.mark.parametrize("widths", [(64, 8), (8, 64)])
def test_two_models_of_which_one_has_a_small_layer_obey_the_policy(widths):
    policy = Policy("float32", "bfloat16", "float32", products=FLOAT8)
    models = [Pair(nnx.Linear, width) for width in widths]
    for model in models:
        apply_policy(model, policy)
    of = PolicyForModules(policy, dict(enumerate(models)))
    assert of("second") == AskedDtypes(BF16, FLOAT8, unknown=True)
    assert of("third") == AskedDtypes(BF16, FLOAT8, required=True, applied=FLOAT8)
    x = jnp.zeros((16, 64))
    assert audit(lambda one, other, x: (one(x), other(x)), *models, x, policy=policy).products == ()


def test_the_dtypes_of_a_policy_are_those_that_it_or_a_rule_names():
    rules = {"head": "float16", "stem": Policy("float32", "float64")}
    of = PolicyForModules(Policy("float32", "bfloat16", rules=rules, products=FLOAT8), {})
    assert of.dtypes == {jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")}


class Small(nnx.Module):
    """A layer of too few inputs, at both ends."""

    def __init__(self):
        self.only = nnx.Linear(16, 64, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("policy", "module", "recipe"),
    [
        ("mixed_float8", Net, FLOAT8),
        ("mixed_float8", Small, FLOAT8),
        ("mixed_float8;*=bfloat16", Net, None),
        ("mixed_float8;only=bfloat16", Small, None),
        ("mixed_bfloat16;blocks=float8", Net, FLOAT8),
        ("mixed_bfloat16", Net, None),
    ],
)
def test_float8_is_awaited_unless_the_users_rules_take_every_layer_out(policy, module, recipe):
    assert PolicyForModules(get_policy(policy), {"": module()}).awaited(["blocks/0/linear"]) == recipe


def test_without_modules_float8_is_awaited_if_one_of_the_products_is_to_be_in_it():
    of = PolicyForModules(get_policy("mixed_bfloat16;blocks=float8"), {})
    assert of.awaited(["stem", "blocks/0"]) == FLOAT8
    assert of.awaited(["stem"]) is None
    assert PolicyForModules(get_policy("mixed_float8"), {}).awaited([]) == FLOAT8
    assert PolicyForModules(get_policy("mixed_float8;*=bfloat16"), {}).awaited([]) is None
    assert PolicyForModules(None, {}).awaited([]) is None


def test_a_rule_that_decides_neither_a_module_nor_a_named_scope_is_an_error():
    of = PolicyForModules(get_policy("mixed_bfloat16;scores=float32"), {"": Net()})
    of.require_rules({"blocks/0/linear", "head/scores", "scores"})
    of.require_rules(None)
    with pytest.raises(UsageError, match="rule 'scores' matches nothing; nearest: "):
        of.require_rules({"blocks/0/linear"})


def test_a_rule_by_class_without_modules_is_an_error_that_says_what_to_give():
    of = PolicyForModules(get_policy("mixed_float8;type:Linear=float32"), {})
    with pytest.raises(UsageError, match="rule 'type:Linear' names a class, and no Flax NNX module is known here"):
        of.require_rules(None)
    of = PolicyForModules(get_policy("mixed_float8;type:Head=float32"), {})
    with pytest.raises(UsageError, match="rule 'type:Head' names a class"):
        of.require_rules(None)
    PolicyForModules(get_policy("mixed_float8"), {}).require_rules(set())


@pytest.mark.parametrize("asked", ["mixed_float8", "mixed_bfloat16"])
@pytest.mark.parametrize("applied", ["mixed_float8", "mixed_bfloat16"])
def test_an_audit_tells_layers_that_are_not_in_the_dtypes_asked_for(asked, applied):
    model = Net()
    apply_policy(model, applied)
    wrong = {row.path for row in audit(model, jnp.ones((16, 64), jnp.bfloat16), policy=asked).products}
    assert wrong == (set() if asked == applied else {f"blocks/{number}/linear" for number in (0, 3, 4)})
