"""Optimizers of optax by name, and the user's own: what they are given, and what is an error."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.config import Duration, Optimizer, Precision
from mpjax.errors import UsageError
from mpjax.loop import adopt, to_arrays
from mpjax.precision import loss_scale_state
from mpjax.training import (
    ELEMENTWISE,
    OWN,
    Kernels,
    TrainState,
    advice_on,
    find_rule,
    learning_rate_schedule,
    optax_rules,
    update_rule,
    with_precision,
)


RATE = 0.05
NAMES = sorted(set(optax_rules()) - set(OWN))
REFUSED = {"dpsgd", "lbfgs", "schedule_free", "schedule_free_adamw", "schedule_free_sgd", "sophia"}
NOT_FROM_ZERO = {"dadapt_adamw", "prodigy"}
OPTAX = "ignore:.*(optax|optimistic_adam)"
"""Optax's own warnings of what a later version will remove."""

STEADY = {"schedule": "constant", "warmup": Duration(0)}


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def built(name, *, rate=RATE, **settings):
    config = Optimizer(name=name, learning_rate=rate, **STEADY, **settings)
    return update_rule(config, optax.constant_schedule(rate))


def params_of(seed=0):
    """A network of two layers: kernels [4, 6] and [6, 3]."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"first/kernel": (4, 6), "first/bias": (6,), "head/kernel": (6, 3), "head/bias": (3,)}
    return {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def loss_of(params, x, dtype):
    weights = {name: p.astype(dtype) for name, p in params.items()}
    hidden = jnp.tanh(x.astype(dtype) @ weights["first/kernel"] + weights["first/bias"])
    logits = hidden @ weights["head/kernel"] + weights["head/bias"]
    return jnp.mean(jnp.square(logits - 1)).astype(jnp.float32)


@jax.jit(static_argnums=2)
def scaled_grads(params, x, dtype, scale):
    loss, grads = jax.value_and_grad(lambda p: loss_of(p, x, dtype) * scale)(params)
    return loss / scale, grads


INPUTS = [jax.random.normal(jax.random.key(seed), (5, 4)) for seed in (7, 8, 9)]


def quick(names, *chosen):
    """The names as parameters; those that are not chosen are slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in sorted(names)]


@pytest.mark.slow
@pytest.mark.filterwarnings(OPTAX)
@pytest.mark.parametrize("name", quick(NAMES, "lion", "adafactor", "momo", "noisy_sgd", "sm3"))
def test_every_optimizer_of_optax_skips_an_overflow_resumes_and_is_optaxs(name):
    """Three steps; the second has an overflow. In float32, the others are those of a loop with optax alone."""
    if name in REFUSED:
        with pytest.raises(UsageError, match="wants|cannot be used"):
            built(name)
        return
    tx = with_precision(built(name), Precision(initial_scale=256), loss_scale="dynamic", weights="none")

    @jax.jit
    def apply(state, grads, loss):
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
        return dataclasses.replace(state, params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    def step(state, x, dtype, *, overflow=False):
        loss, grads = scaled_grads(state.params, x, dtype, loss_scale_state(state.opt_state).scale)
        assert np.isfinite(loss)
        return apply(state, {**grads, "head/bias": grads["head/bias"] * jnp.inf} if overflow else grads, loss)

    def begin():
        params = params_of()
        return TrainState(jnp.int32(0), params, {}, jax.jit(tx.init)(params), {})

    for dtype in (jnp.float32, jnp.float16):
        first = step(begin(), INPUTS[0], dtype)
        second = step(first, INPUTS[1], dtype, overflow=True)
        kept = (first.params, first.opt_state.inner_state), (second.params, second.opt_state.inner_state)
        assert [*map(_bits, jax.tree.leaves(kept[0]))] == [*map(_bits, jax.tree.leaves(kept[1]))]
        assert (float(second.opt_state.scale), int(second.opt_state.skipped)) == (128, 1)

        third = step(second, INPUTS[2], dtype)
        assert np.isfinite(scaled_grads(third.params, INPUTS[2], dtype, 1.0)[0])
        assert any(_bits(second.params[path]) != _bits(third.params[path]) for path in third.params)
        resumed = step(adopt(begin(), to_arrays(second)), INPUTS[2], dtype)
        for one, other in zip(jax.tree.leaves(third), jax.tree.leaves(resumed), strict=True):
            assert _bits(one) == _bits(other)
        if dtype == jnp.float32:
            for path, wanted in _with_optax(name, (INPUTS[0], INPUTS[2])).items():
                np.testing.assert_allclose(third.params[path], wanted, rtol=1e-6, atol=1e-6, err_msg=path)


def _bits(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()


def _with_optax(name, inputs):
    """The parameters after a loop without mpjax, with weight decay 5e-4 of kernels where the optimizer has a mask."""
    function = optax_rules()[name]
    names = inspect.signature(function).parameters
    mask = {"first/kernel": True, "first/bias": False, "head/kernel": True, "head/bias": False}
    masks = {key: mask for key in ("mask", "weight_decay_mask") if key in names and "weight_decay" in names}
    decay = {"weight_decay": 5e-4} if "weight_decay" in names else {}
    tx = optax.with_extra_args_support(function(learning_rate=RATE, **decay, **masks))
    params = params_of()
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads, loss):
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for x in inputs:
        loss, grads = scaled_grads(params, x, jnp.float32, 1.0)
        params, state = step(params, state, grads, loss)
    return params


@pytest.mark.slow
@pytest.mark.filterwarnings(OPTAX)
@pytest.mark.parametrize("name", quick(set(NAMES) - REFUSED, "lion", "adafactor", "momo", "prodigy", "dadapt_adamw"))
def test_every_optimizer_trains_with_the_default_schedule_or_says_what_to_write(name):
    """The default is a warm-up from 0: either ten steps are finite, or it is an error that names the flag."""
    config = Optimizer(name=name)
    schedule = learning_rate_schedule(config, steps=10, warmup=2)
    assert float(schedule(0)) == 0
    if name in NOT_FROM_ZERO | {"optimistic_adam", "rprop", "sm3"}:
        with pytest.raises(UsageError, match="--optimizer.warmup 0"):
            update_rule(config, schedule)
        return
    tx = update_rule(config, schedule)
    params = params_of()
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = scaled_grads(params, INPUTS[0], jnp.float32, 1.0)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(10):
        params, state = step(params, state)
    assert all(np.all(np.isfinite(p)) for p in params.values())


@pytest.mark.slow
@pytest.mark.filterwarnings(OPTAX)
@pytest.mark.parametrize("name", sorted(NOT_FROM_ZERO))
def test_a_rule_that_divides_by_a_rate_of_zero_is_refused_only_where_the_rate_begins_at_zero(name):
    said = "become NaN or inf if the learning rate begins at 0, as in a warm-up; write --optimizer.warmup 0"
    with pytest.raises(UsageError, match=f"--optimizer.name {name}: its parameters {said}"):
        update_rule(Optimizer(name=name), optax.linear_schedule(0.0, 1.0, 4))
    update_rule(Optimizer(name=name, warmup=Duration(0)), optax.constant_schedule(1.0))
    with pytest.raises(UsageError, match="write a schedule and a learning rate that begin above 0"):
        update_rule(Optimizer(name=name, learning_rate=0.0), optax.constant_schedule(0.0))


def test_the_names_are_those_of_optax_and_optax_contrib():
    assert {"lion", "adam", "nadamw", "rmsprop", "novograd", "adafactor", "sm3", "prodigy", "momo"} <= set(NAMES)
    assert not {"scale_by_rprop", "scale_by_learning_rate", "chain", "polyak_sgd", "sam"} & set(NAMES)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "lbfgs",
            "--optimizer.name lbfgs cannot be used: TypeError: .*'grad' and 'value_fn'. An update is given",
        ),
        ("sophia", "--optimizer.name sophia cannot be used: ValueError: obj_fn must be provided"),
        ("dpsgd", "wants l2_norm_clip, noise_multiplier, seed: write --optimizer.arguments l2_norm_clip VALUE"),
        ("schedule_free_adamw", "cannot be used: the parameters to evaluate are not those that it trains"),
        ("schedule_free", "wants base_optimizer"),
        ("polyak_sgd", "optax.polyak_sgd is no optimizer with a learning rate"),
        ("sam", "optax.contrib.sam is no optimizer with a learning rate"),
        ("lyon", "no optimizer 'lyon'; nearest: lion"),
        ("adam_w", "no optimizer 'adam_w'; nearest: adamw"),
    ],
)
def test_what_cannot_be_used_says_why(name, reason):
    with pytest.raises(UsageError, match=reason):
        built(name)


@pytest.mark.filterwarnings(OPTAX)
def test_gradients_of_single_examples_are_not_there():
    """dpsgd would take the first axis of a gradient for the examples of a batch."""
    with pytest.raises(UsageError, match="--optimizer.name dpsgd cannot be used: .*batch dimension"):
        built("dpsgd", arguments={"l2_norm_clip": "1.0", "noise_multiplier": "0.1", "seed": "0"})


@pytest.mark.filterwarnings(OPTAX)
@pytest.mark.parametrize("name", ["sm3", "rprop", "optimistic_adam"])
def test_an_optimizer_of_a_number_refuses_a_schedule(name):
    built(name)
    for changed in ({"schedule": "cosine"}, {"warmup": Duration(2)}):
        config = dataclasses.replace(Optimizer(name=name, **STEADY), **changed)
        with pytest.raises(UsageError, match=r"takes a number .* write --optimizer.schedule constant --optimizer.warm"):
            update_rule(config, optax.constant_schedule(0.1))


def test_arguments_arrive():
    assert find_rule(Optimizer(name="lion", arguments={"b2": "0.98", "mu_dtype": "bfloat16"})).arguments == {
        "b2": 0.98,
        "mu_dtype": "bfloat16",
        "weight_decay": 5e-4,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"b2": 0.9}, r"--optimizer.b2 0.9 is for sgd, .*; for lion write --optimizer.arguments b2 0.9"),
        ({"momentum": 0.5}, r"--optimizer.momentum 0.5 .*; for lion write one that it has: learning_rate, b1, b2"),
        (
            {"arguments": {"learning_rate": "1"}},
            r"--optimizer.arguments learning_rate: write --optimizer.learning_rate 1",
        ),
        ({"arguments": {"b3": "1"}}, r"--optimizer.arguments b3: lion has no such argument; did you mean b"),
        ({"arguments": {"weight_decay": "0.1"}, "weight_decay": 0.2}, "wanted one of them"),
    ],
)
def test_a_setting_that_does_not_apply_is_an_error(settings, message):
    with pytest.raises(UsageError, match=message):
        find_rule(Optimizer(name="lion", **settings))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_arguments_are_not_for_the_rules_with_settings(name):
    with pytest.raises(UsageError, match=f"--optimizer.arguments x: .* --optimizer.name optax:{name}"):
        find_rule(Optimizer(name=name, arguments={"x": "1"}))


@pytest.mark.parametrize("name", ["muon", "optax.contrib:muon"])
def test_muon_is_optaxs_and_says_which_parameters_it_leaves_to_adamw(name):
    params = {"conv": jnp.ones((3, 3, 2, 8)), "head": jnp.ones((8, 3)), "bias": jnp.ones(3)}
    grads = {path: jax.random.normal(jax.random.key(0), p.shape) for path, p in params.items()}
    tx = built(name, rate=0.1, weight_decay=0.0)
    updates, _ = tx.update(grads, tx.init(params), params)
    turned = np.linalg.svd(updates["head"], compute_uv=False)
    assert np.all((turned > 0.07) & (turned < 0.12))  # the rate is 0.1; five iterations give 0.7 to 1.2 of it
    np.testing.assert_allclose(updates["conv"], -0.147367 * np.sign(grads["conv"]), rtol=1e-3)  # NAdam's first step
    (note,) = advice_on(Optimizer(name=name))
    assert "AdamW updates all other parameters, such as embeddings and filters of convolutions, and decays none" in note


@pytest.mark.parametrize("name", ["lion", "lars"])
def test_weight_decay_is_of_kernels(name):
    """Also where optax calls the mask `weight_decay_mask`."""
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = built(name, weight_decay=0.5)
    updates, _ = tx.update(zero, tx.init(params), params)
    assert np.all(updates["kernel"] < 0)
    assert updates["bias"].tolist() == [0, 0]
    assert advice_on(Optimizer(name=name)) == ()


def test_weight_decay_that_cannot_be_masked_or_applied_is_said():
    (note,) = advice_on(Optimizer(name="novograd"))
    assert note == "weight decay 0.0005 is of all parameters, norms and biases too: novograd takes no mask"
    assert advice_on(Optimizer(name="adam")) == ("no weight decay: adam takes no weight_decay",)
    assert advice_on(Optimizer(name="adam", weight_decay=0.0)) == advice_on(Optimizer(name="novograd", weight_decay=0))
    with pytest.raises(UsageError, match=r"--optimizer.weight_decay 0.1: adam takes no weight_decay; leave it out"):
        find_rule(Optimizer(name="adam", weight_decay=0.1))
    with pytest.raises(UsageError, match=r"takes weight_decay_rate: write --optimizer.arguments weight_decay_rate 0.1"):
        find_rule(Optimizer(name="adafactor", weight_decay=0.1))
    assert advice_on(Optimizer(name="adafactor", arguments={"weight_decay_rate": "1e-3"})) == ()


def test_bfloat16_moments_are_an_error_where_there_are_none():
    built("lion", moments="bfloat16")
    with pytest.raises(UsageError, match=r"moments bfloat16: .*madgrad has no field mu, .*moments float32"):
        built("madgrad", moments="bfloat16")
    with pytest.raises(UsageError, match="--optimizer.moments int8: the centered RMSProp .* leave centered out"):
        built("rmsprop", moments="int8", arguments={"centered": "True"})


OWN_FILE = """
import jax.numpy as jnp
import optax
from optax import contrib

def mine(learning_rate, steps, warmup, peak, mask, weight_decay, momentum=0.5):
    assert (steps, warmup, peak) == (100, 20, 0.05)
    decay = optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(decay, optax.trace(momentum), optax.scale_by_learning_rate(learning_rate))

def plain(learning_rate, **more):
    return optax.sgd(learning_rate, **more)

def loss_aware(learning_rate):
    return optax.chain(optax.sgd(learning_rate), contrib.reduce_on_plateau(patience=1, factor=0.5))

def free(learning_rate):
    return contrib.schedule_free(optax.sgd(learning_rate), learning_rate)

def sam(learning_rate):
    return contrib.sam(optax.sgd(learning_rate), optax.sgd(0.1))

def nothing(learning_rate):
    return None

def summed(learning_rate):
    return optax.stateless(lambda updates, _: {name: jnp.sum(u) for name, u in updates.items()})

def growing(learning_rate):
    grow = lambda updates, state, params=None: (updates, jnp.append(state, 0.0))
    return optax.GradientTransformation(lambda params: jnp.zeros(1), grow)

def broken(learning_rate):
    raise ZeroDivisionError("by zero")

def wants(learning_rate, teacher):
    pass

def rateless(peak):
    pass

def by_name(learning_rate):
    def labels(params):
        return {name: {"encoder": "prodigy", "head": "sgd"}[name] for name in params}
    rules = {"prodigy": contrib.prodigy(learning_rate), "sgd": optax.sgd(learning_rate)}
    return optax.multi_transform(rules, labels)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FILE)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


@pytest.mark.filterwarnings(OPTAX)
def test_a_rule_of_the_user_is_tried_on_its_own_names(own):
    shapes = {name: jax.ShapeDtypeStruct((4, 3), jnp.float32) for name in ("encoder", "head")}
    config = Optimizer(name=own("by_name"))
    with pytest.raises(UsageError, match="write --optimizer.warmup 0"):
        update_rule(config, optax.linear_schedule(0.0, 1.0, 4), params=shapes)
    update_rule(config, optax.constant_schedule(1.0), params=shapes)


def test_a_function_of_the_user_is_given_what_it_names(own):
    config = Optimizer(name=own("mine"), learning_rate=RATE, weight_decay=0.5, arguments={"momentum": "0.0"})
    tx = update_rule(config, lambda count: 0.1, steps=100, warmup=20)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], np.full((2, 2), -0.05), rtol=1e-6)
    assert updates["bias"].tolist() == [0, 0]


def test_a_function_of_the_user_may_take_any_argument_and_the_loss(own):
    tx = built(own("plain"), arguments={"momentum": "0.9"})
    assert jax.tree.leaves(tx.init({"a": jnp.float32(1)}))[0].shape == ()
    tx = optax.with_extra_args_support(built(own("loss_aware")))
    params = {"a": jnp.float32(1)}
    state = tx.init(params)
    for _ in range(4):  # the loss does not get smaller, three times
        updates, state = tx.update(params, state, params, value=jnp.float32(3))
    assert float(updates["a"]) == pytest.approx(-RATE / 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("free", "the parameters to evaluate are not those that it trains"),
        ("sam", "it takes several gradients for one step"),
        ("summed", "own.py:summed cannot be used: its updates have other shapes or dtypes than the parameters"),
        ("growing", "own.py:growing cannot be used: an update changes the shapes or dtypes of its state"),
        ("nothing", r"own.py:nothing returned NoneType: wanted an optax.GradientTransformation"),
        ("broken", r"own.py:broken cannot be used: ZeroDivisionError: by zero"),
        ("wants", r"own.py:wants wants teacher: write --optimizer.arguments teacher VALUE"),
        ("rateless", r"has no parameter learning_rate: wanted a function \(learning_rate, ...\)"),
        ("absent", r"has no absent; .*it has mine, plain"),
    ],
)
def test_a_function_of_the_user_that_does_not_fit_is_an_error(own, name, message):
    with pytest.raises(UsageError, match=message):
        built(own(name))


def test_a_rule_is_tried_on_the_parameters_of_the_run(own):
    """One that chooses by path may not know others."""
    params = {"blocks/0/kernel": jax.ShapeDtypeStruct((2, 2), jnp.float16)}
    config = Optimizer(name=own("plain"), **STEADY)
    update_rule(config, optax.constant_schedule(0.1), params=params)


@pytest.mark.filterwarnings(OPTAX)
@pytest.mark.parametrize("name", quick(ELEMENTWISE - set(OWN), "lion", "adan", "madgrad"))
def test_rules_that_are_said_to_treat_numbers_one_by_one_do(name):
    """Packed vectors and stacked blocks give the same updates as apart."""
    tx = optax.with_extra_args_support(built(name, weight_decay=0.0 if _decays(name) else 5e-4))
    small, large = jnp.array([0.1, -0.2, 0.3]), jnp.array([10.0, -30.0])
    rows = jnp.arange(12.0).reshape(2, 2, 3) - 5
    packed = {"vectors": jnp.concatenate([small, large]), "stack": rows}
    alone = {"small": small, "large": large, "row0": rows[0], "row1": rows[1]}

    @jax.jit
    def two_steps(params):
        state = tx.init(params)
        for factor in (1.0, -0.3):
            grads = jax.tree.map(lambda p: factor * p, params)  # noqa: B023 - used at once
            updates, state = tx.update(grads, state, params, value=jnp.float32(1))
            params = optax.apply_updates(params, updates)
        return params

    together, apart = two_steps(packed), two_steps(alone)
    np.testing.assert_allclose(together["vectors"], jnp.concatenate([apart["small"], apart["large"]]), rtol=1e-6)
    np.testing.assert_allclose(together["stack"], jnp.stack([apart["row0"], apart["row1"]]), rtol=1e-6)


def _decays(name):
    return bool(find_rule(Optimizer(name=name)).arguments)


@pytest.mark.parametrize("name", ["novograd", "adafactor", "prodigy", "optax:adam"])
def test_a_rule_that_may_look_at_whole_arrays_refuses_stacks(name):
    with pytest.raises(UsageError, match=rf"name {name} with --model.scan_blocks: .*write --model.no_scan_blocks"):
        update_rule(Optimizer(name=name, **STEADY), optax.constant_schedule(0.1), Kernels({"blocks": 2}))
