"""What a diagnosis leaves as it was, what it takes, and what it names that is wrong in what it was given."""

import tomllib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose, diagnose_function, float32_fraction, program_of_function
from mpjax.errors import UsageError
from mpjax.models import MLP
from mpjax.precision import apply_policy, get_policy


class Noisy(nnx.Module):
    """A linear layer, batch norm and dropout: parameters, statistics and random numbers."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def mean_square(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]).astype(jnp.float32)))


BATCH = {"x": jnp.arange(8.0).reshape(2, 4) / 8, "y": jnp.array([0, 1])}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stored", ["float32", "mixed_bfloat16", "float16"])
def test_the_model_is_left_as_it_was(training, stored):
    model = Noisy()
    apply_policy(model, stored)
    model.train() if training else model.eval()

    def everything():
        graph, state = nnx.split(model)
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        values = {
            path: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for path, leaf in leaves.items()
        }
        return hash(graph), values

    before = everything()
    diagnose(model, mean_square, BATCH, policy="mixed_float16", loss_scale=8.0)
    after = everything()
    assert after[0] == before[0]  # classes, dtypes to compute in, the mode
    assert after[1].keys() == before[1].keys()
    for path, value in before[1].items():
        assert after[1][path].dtype == value.dtype
        np.testing.assert_array_equal(after[1][path], value)


@pytest.mark.parametrize("bad", [pytest.param(jnp.inf, marks=pytest.mark.slow), jnp.nan])
def test_what_goes_in_and_is_not_finite_is_named(bad):
    batch = {"images": {"left": BATCH["x"], "right": BATCH["x"].at[1, 2].set(bad)}}
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        return mean_square(model, {"x": batch["images"]["left"]}) + mean_square(model, {"x": batch["images"]["right"]})

    found = diagnose(model, loss_fn, batch)
    assert (found.verdict, found.path, found.rules) == ("not_precision", None, {})
    assert "an input is not finite: batch/images/right. No choice of dtypes" in found.evidence


@pytest.mark.parametrize("policy", [pytest.param("mixed_float16", marks=pytest.mark.slow), "float16"])
def test_a_parameter_that_is_not_finite_is_named(policy):
    model = Noisy()
    model.linear.kernel[...] = model.linear.kernel[...].at[0, 0].set(jnp.nan)
    found = diagnose(model, mean_square, BATCH, policy=policy)
    assert found.verdict == "not_precision"
    assert "an input is not finite: parameter linear/kernel." in found.evidence


def test_of_many_inputs_that_are_not_finite_three_are_named():
    batch = [jnp.full(2, jnp.nan)] * 5
    found = diagnose_function(lambda params, batch: params * sum(jnp.sum(x) for x in batch), jnp.float32(1), batch)
    assert "not finite: batch/0, batch/1, batch/2 and 2 more." in found.evidence


def test_an_input_that_is_not_used_is_not_to_blame():
    found = diagnose_function(
        lambda params, batch: jnp.log(params - batch["x"]), jnp.float32(1), {"x": jnp.float32(1), "y": jnp.nan}
    )
    assert (found.verdict, found.operation) == ("not_precision", "log")
    assert "the first non-finite result is log" in found.evidence


def test_a_step_without_parameters():
    found = diagnose_function(lambda params, batch: jnp.sum(batch), {}, jnp.ones(3))
    assert (found.verdict, found.flushed) == ("healthy", {})


def test_a_model_without_products():
    class Shift(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(jnp.zeros(4))
            self.dtype = jnp.float32

        def __call__(self, x):
            return x.astype(self.dtype) + self.bias[None].astype(self.dtype)

    assert diagnose(Shift(), mean_square, BATCH).verdict == "healthy"
    found = diagnose(Shift(), mean_square, {"x": BATCH["x"] + 1e5})
    assert (found.verdict, found.path, found.float32_flops) == ("overflow", "", 0.0)
    assert found.rules == {"*": "float32"}


@pytest.mark.parametrize(
    ("rules", "share"),
    [
        ({}, 0.0),
        ({"large": "float32"}, 0.75),
        ({"large": "bfloat16"}, 0.0),
        ({"large": "bfloat16", "small": "float32"}, 0.25),
        ({"*": "float32"}, 1.0),
        ({"*": "bfloat16"}, 0.0),
    ],
)
def test_only_rules_that_say_float32_move_flops_to_float32(rules, share):
    def loss_fn(params, batch):
        with jax.named_scope("large"):
            large = batch @ params["large"]
        with jax.named_scope("small"):
            return jnp.sum(large) + jnp.sum(batch @ params["small"])

    params = {"large": jnp.ones((4, 12)), "small": jnp.ones((4, 4))}
    program = program_of_function(loss_fn, params, jnp.ones((2, 4)), get_policy("mixed_bfloat16"))
    assert float32_fraction(program, rules) == share


class Ratio(nnx.Module):
    """x / (x + 1e-8), which no rounding less repairs in half precision: the constant is zero; and a layer of it."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        return self.linear(x / (x + 1e-8))


class Ratios(nnx.Module):
    def __init__(self):
        self.left, self.right = Ratio(), Ratio()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.left(x).astype(jnp.float32) + self.right(x).astype(jnp.float32)


def test_a_module_and_what_is_in_it_are_tried_as_one_rule():
    found = diagnose(Ratios(), mean_square, BATCH)
    assert (found.verdict, found.path) == ("underflow", "left")
    assert found.verified
    assert found.rules == {"left": "float32", "right": "float32"}


def test_rules_under_which_strict_promotion_refuses_the_step_are_not_proposed():
    class Strict(Ratios):
        def __call__(self, x):
            return self.left(x) + self.right(x * 0 + 1)  # of which the second has no fault

    found = diagnose(Strict(), mean_square, BATCH)
    assert found.verified
    assert found.rules == {"left": "float32", "right": "float32"}


def test_a_policy_in_full_precision_has_nothing_to_diagnose():
    with pytest.raises(UsageError, match="has no half precision: wanted one such as mixed_float16"):
        diagnose(Noisy(), mean_square, BATCH, policy="float32")


def test_products_in_float8_are_diagnosed_beside_float32():
    model = nnx.Sequential(nnx.Linear(4, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 64, rngs=nnx.Rngs(1)))
    policy = "params=float32,compute=float32,output=float32,products=float8"
    found = diagnose(model, mean_square, BATCH, policy=policy, search=False)
    assert {str(row.dtype) for row in found.table} >= {"float8_e4m3fn", "float8_e5m2"}


def test_an_optimizer_s_state_without_the_optimizer_is_an_error():
    with pytest.raises(UsageError, match="opt_state without tx: give the optimizer too"):
        diagnose(Noisy(), mean_square, BATCH, opt_state=())


def test_a_function_is_no_module():
    with pytest.raises(UsageError, match=r"got function; for a function of parameters use mpjax\.diagnosis\."):
        diagnose(mean_square, mean_square, BATCH)


class Deep(nn.Module):
    """Four layers of linen, each in the scope of the whole."""

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = nn.tanh(nn.Dense(8, name=f"l{i}")(x))
        return nn.Dense(1, name="head")(x)


def overflowing_linen():
    net, x = Deep(), jnp.ones((4, 8))
    params = net.init(jax.random.key(0), x)["params"]
    params["l2"]["kernel"] *= 1e6
    return lambda params, x: jnp.mean(net.apply({"params": params}, x) ** 2), params, x


@pytest.mark.slow
def test_of_a_model_in_a_scope_of_its_own_one_layer_is_enough():
    found = diagnose_function(*overflowing_linen(), policy="mixed_float16")
    assert (found.verdict, found.path) == ("overflow", "Deep/l2")
    assert found.rules == {"Deep/l2": "float32"}
    assert found.verified
    assert found.float32_flops < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("own", ["Deep/l0=float32", "*/head=float32", "Deep=float16"])
def test_rules_that_are_there_already_are_no_obstacle(own):
    found = diagnose_function(*overflowing_linen(), policy=f"mixed_float16;{own}")
    assert (found.verdict, found.rules, found.verified) == ("overflow", {"Deep/l2": "float32"}, True)
    assert diagnose_function(*overflowing_linen(), policy=found.repaired_policy).verdict == "healthy"


@pytest.mark.slow
def test_a_scale_far_too_high_is_named_with_a_power_of_two_that_is_not():
    loss_fn, params, x = overflowing_linen()
    params["l2"]["kernel"] /= 1e6
    found = diagnose_function(loss_fn, params, x, policy="mixed_float16", loss_scale=3e9)
    assert (found.verdict, found.verified) == ("loss_scale", True)
    assert np.log2(found.better_scale) == int(np.log2(found.better_scale))


@pytest.mark.parametrize(
    "bad",
    [{"loss_scale": 0.0}, {"loss_scale": -1.0}, {"loss_scale": np.inf}, {"tolerance": -1.0}, {"tolerance": np.nan}],
)
def test_numbers_that_mean_nothing_are_refused(bad):
    with pytest.raises(UsageError, match="wanted a positive number"):
        diagnose_function(*overflowing_linen(), policy="mixed_float16", **bad)


class Squared(nnx.Module):
    """What overflows in float16, and takes the dtype of its input."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(4))
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.square(x.astype(self.dtype) * 300) * 1e-4 * self.weight[...].astype(self.dtype)[None]


def test_a_rule_for_a_name_that_a_policy_s_text_cannot_hold_has_a_pattern():
    class Named(nnx.Module):
        def __init__(self):
            setattr(self, "k=3;[a]", Squared())
            self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head(getattr(self, "k=3;[a]")(x))

    found = diagnose(Named(), mean_square, {"x": jnp.ones((2, 4))})
    assert (found.path, found.rules, found.verified) == ("k=3;[a]", {"k?3??a]": "float32"}, True)
    again = diagnose(Named(), mean_square, {"x": jnp.ones((2, 4))}, policy=found.repaired_policy)
    assert again.verdict == "healthy"


@pytest.mark.slow
def test_a_module_without_a_dtype_is_repaired_by_a_rule_for_it():
    class ByItsSize(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-8)
            return x * scale * self.weight[...].astype(x.dtype)[None]

    class Net(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.norm = ByItsSize()
            self.last = nnx.Linear(4, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.last(self.norm(self.first(x)))

    found = diagnose(Net(), mean_square, {"x": jnp.zeros((2, 4))})
    assert (found.verdict, found.path, found.operation) == ("underflow", "norm", "constant 1e-08")
    assert (found.rules, found.verified) == ({"norm": "float32"}, True)


@pytest.mark.slow
def test_an_overflow_beside_a_scale_that_is_too_high_is_repaired_by_rules_and_a_lower_scale():
    model, x = MLP(8, 8, 6, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (8, 8))
    model.layers[3].kernel[...] *= 1e6
    model.layers[4].kernel[...] *= 1e-6

    def loss_fn(model, x):
        logits = model(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(8) % 4).mean()

    found = diagnose(model, loss_fn, x, loss_scale=2.0**22)
    assert (found.verdict, found.path, found.direction) == ("overflow", "layers/3", "forward")
    assert found.rules == {"layers/3": "float32", "layers/4": "float32"}
    assert found.better_scale is not None
    assert "With that repaired, the loss scale of 4.1943e+06 is too high" in found.evidence
    assert found.flags == (
        f'--precision.loss_scale {found.better_scale:.10g} --precision.rules "layers/3" float32 "layers/4" float32'
    )
    assert tomllib.loads(found.toml)["precision"].keys() == {"loss_scale", "rules"}
    again = diagnose(model, loss_fn, x, policy=found.repaired_policy, loss_scale=found.better_scale)
    assert again.verdict == "healthy"
