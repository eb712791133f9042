"""Which layers multiply in float8 under a policy, and what is said of those that do not."""

import functools

import jax
import pytest
from flax import nnx

import mpjax
from mpjax.errors import UsageError
from mpjax.precision.casting import equations
from mpjax.precision.float8 import is_linear, is_quantised, tags_of


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(64, 64, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.narrow = nnx.List([nnx.List([nnx.Linear(64, 32, rngs=rngs), nnx.Linear(96, 72, rngs=rngs)])])
        self.head = nnx.Linear(64, 128, rngs=rngs)


def net():
    return nnx.eval_shape(lambda: Net(nnx.Rngs(0)))


def dtypes(report):
    return {row.path: (str(row.compute_dtype), row.rule) for row in report}


def test_layers_at_the_ends_norms_and_small_products_stay_wide_by_rules_that_the_report_names():
    found = dtypes(mpjax.apply_policy(net(), "mixed_float8"))
    assert found == {
        "stem": ("bfloat16", "type:first_or_last"),
        "head": ("bfloat16", "type:first_or_last"),
        **{f"blocks/{i}/norm": ("float32", "type:norm") for i in (0, 1)},
        **{f"blocks/{i}/{name}": ("float8_e4m3fn", "policy") for i in (0, 1) for name in ("up", "down")},
        "narrow/0/0": ("bfloat16", "type:small_product"),
        "narrow/0/1": ("bfloat16", "type:small_product"),
    }


def test_a_weight_with_a_side_that_does_not_divide_is_told():
    notes = mpjax.apply_policy(net(), "mixed_float8").notes
    assert notes == (
        "narrow/0/1 multiplies in bfloat16, not in float8: its weight is 96 x 72, and 72 is no multiple of 16, which "
        "float8 needs",
    )


def test_the_first_and_last_of_a_list_of_layers_stay_wide():
    layers = nnx.eval_shape(lambda: nnx.Sequential(*[nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(4)]))
    found = dtypes(mpjax.apply_policy(layers, "mixed_float8"))
    assert [found[f"layers/{i}"][0] for i in range(4)] == ["bfloat16", "float8_e4m3fn", "float8_e4m3fn", "bfloat16"]


def test_rules_take_layers_out_and_in():
    rules = {"blocks/0": "bfloat16", "head": "float8_rowwise", "type:norm": "float32"}
    model = net()
    found = dtypes(mpjax.apply_policy(model, mpjax.Policy("float32", "bfloat16", rules=rules)))
    assert found["blocks/0/up"] == ("bfloat16", "blocks/0")
    assert found["blocks/1/up"] == ("bfloat16", "policy")
    assert found["head"] == ("float8_e4m3fn", "head")
    assert str(model.head.dot_general.recipe) == "float8_rowwise"


def test_a_recipe_is_a_rule_for_linear_layers_alone():
    found = dtypes(mpjax.apply_policy(net(), mpjax.Policy("float32", "bfloat16", rules={"blocks/*": "float8"})))
    assert found["blocks/0/norm"] == ("float32", "type:norm")
    assert found["blocks/0/up"] == ("float8_e4m3fn", "blocks/*")


def test_a_recipe_for_no_linear_layer_is_an_error():
    with pytest.raises(UsageError, match="rule 'blocks/0/norm' decides nothing: float8 is for linear layers"):
        mpjax.apply_policy(net(), mpjax.Policy("float32", "bfloat16", rules={"blocks/0/norm": "float8"}))


def test_a_later_policy_takes_all_layers_out():
    model = net()
    mpjax.apply_policy(model, "mixed_float8")
    assert is_quantised(model.blocks[0].up)
    mpjax.apply_policy(model, "mixed_bfloat16")
    assert model.blocks[0].up.dot_general is jax.lax.dot_general


def test_a_layer_with_the_users_own_product_is_left_alone():
    model = net()
    own = model.blocks[0].up.dot_general = functools.partial(jax.lax.dot_general)
    mpjax.apply_policy(model, "mixed_float8")
    assert model.blocks[0].up.dot_general is own


class JaxProduct(nnx.Linear):
    def __call__(self, x):
        return jax.lax.dot_general(x, self.kernel[...], (((x.ndim - 1,), (0,)), ((), ())))


class LayersProduct(nnx.Linear):
    def __call__(self, x):
        return self.dot_general(x, self.kernel[...], (((x.ndim - 1,), (0,)), ((), ())))


class ProductInside(nnx.Linear):
    def __call__(self, x):
        return jax.vmap(lambda row: self.dot_general(row, self.kernel[...], (((0,), (0,)), ((), ()))))(x)


class FlaxsCall(nnx.Linear):
    def __call__(self, x):
        return super().__call__(2 * x)


@pytest.mark.parametrize(
    ("layer", "takes_float8"), [(JaxProduct, False), (LayersProduct, True), (ProductInside, True), (FlaxsCall, True)]
)
def test_a_subclass_takes_float8_if_its_call_uses_the_product_of_the_layer(layer, takes_float8):
    model = nnx.eval_shape(lambda: layer(128, 64, rngs=nnx.Rngs(0)))
    assert is_linear(model) is takes_float8


def test_rules_that_take_all_layers_out_are_no_error():
    model = net()
    mpjax.apply_policy(model, "mixed_float8;*=float32")
    assert not is_quantised(model.blocks[0].up)


class Doubled(nnx.Linear):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class ByItself(nnx.Linear):
    def __call__(self, inputs):
        return inputs @ self.kernel[...]


class ByDotGeneral(nnx.Linear):
    def __call__(self, inputs):
        return self.dot_general(inputs, self.kernel[...], (((1,), (0,)), ((), ())))


@pytest.mark.parametrize("cls", [Doubled, ByDotGeneral, nnx.LoRALinear])
def test_a_layer_is_said_to_be_in_float8_if_its_product_is(cls):
    extra = {"lora_rank": 4} if cls is nnx.LoRALinear else {}
    layers = nnx.List([cls(64, 64, **extra, rngs=nnx.Rngs(0)) for _ in range(4)])
    found = [dtypes(mpjax.apply_policy(layers, "mixed_float8;*=float8"))["1"][0] for _ in range(2)]
    jaxpr = jax.make_jaxpr(layers[1])(jax.numpy.ones((2, 64)))
    multiplied = {str(eqn.invars[1].aval.dtype) for _, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"}
    assert found == ["float8_e4m3fn"] * 2  # the second time, its class looks for wrappers
    assert "float8_e4m3fn" in multiplied


def test_a_layer_that_multiplies_by_itself_is_not_said_to_be_in_float8():
    layers = nnx.List([*(nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(3)), ByItself(64, 64, rngs=nnx.Rngs(0))])
    found = [dtypes(mpjax.apply_policy(layers, "mixed_float8;*=float8")) for _ in range(2)]
    assert [each["3"][0] for each in found] == ["bfloat16"] * 2
    assert [each["2"][0] for each in found] == ["float8_e4m3fn"] * 2


class Numbered(nnx.Module):
    def __init__(self, names, make):
        for name in names:
            setattr(self, name, make())


@pytest.mark.parametrize(
    ("names", "inner"),
    [
        (("fc1", "fc2", "fc3"), ["fc2"]),
        (("layer_0", "layer_1", "layer_2", "layer_3", "head"), ["layer_1", "layer_2"]),
        (("fc8", "fc9", "fc10"), ["fc9"]),
        (("a1", "a2", "b3", "b4"), []),
        (("fc1", "fc2", "fc4"), []),
        (("fc1", "fc2"), []),
    ],
)
def test_attributes_numbered_one_after_the_other_are_a_list_of_layers(names, inner):
    model = Numbered(names, lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    tags = tags_of({name: getattr(model, name) for name in names})
    assert [name for name in names if "first_or_last" not in tags[name]] == inner


def test_all_layers_in_numbered_blocks_are_inner_ones():
    model = Numbered(("layer1", "layer2", "layer3"), lambda: Block(nnx.Rngs(0)))
    found = dtypes(mpjax.apply_policy(model, "mixed_float8"))
    inner = [path for path, (dtype, _) in found.items() if dtype == "float8_e4m3fn"]
    assert inner == [f"layer{i}/{name}" for i in (1, 2, 3) for name in ("down", "up")]


class Attentive(nnx.Module):
    def __init__(self):
        general = nnx.LinearGeneral(64, (4, 16), rngs=nnx.Rngs(0))
        self.blocks = nnx.List([nnx.Dict(a=general, b=nnx.Linear(64, 64, rngs=nnx.Rngs(0)))])


def test_a_rule_for_the_class_linear_says_that_it_is_not_for_linear_general():
    report = mpjax.apply_policy(Attentive(), "mixed_float8;type:Linear=bfloat16")
    assert dtypes(report)["blocks/0/a"][0] == "float8_e4m3fn"
    assert report.notes == (
        "rule 'type:Linear' does not cover LinearGeneral (blocks/0/a): 'type:linear_layer' covers all linear layers",
    )
    report = mpjax.apply_policy(Attentive(), "mixed_float8;type:linear_layer=bfloat16")
    assert ({dtype for dtype, _ in dtypes(report).values()}, report.notes) == ({"bfloat16"}, ())


def test_the_advice_for_a_model_without_inner_layers_is_right():
    layers = nnx.List([nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(2)])
    says = "so that a list of two has no inner one. Write a rule .* rules={'type:linear_layer': 'float8'}"
    with pytest.raises(UsageError, match=says):
        mpjax.apply_policy(layers, "mixed_float8")
    found = dtypes(mpjax.apply_policy(layers, "mixed_float8;type:linear_layer=float8"))
    assert [dtype for dtype, _ in found.values()] == ["float8_e4m3fn"] * 2


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "type:first_or_last decided all 1 linear layers"),
        (lambda: nnx.Conv(64, 64, (3, 3), rngs=nnx.Rngs(0)), "the model has no linear layer"),
    ],
)
def test_a_model_without_a_product_in_float8_is_an_error(model, says):
    with pytest.raises(UsageError, match=says):
        mpjax.apply_policy(nnx.eval_shape(model), "mixed_float8")
