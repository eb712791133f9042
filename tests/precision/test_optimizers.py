"""Every optimizer of optax: a scaled run with an overflow is the float32 run without that step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from mpjax.precision import dynamic_loss_scaling, loss_scale_state


def named(*names, module=optax, **settings):
    return {
        name: getattr(module, name)(**{"learning_rate": 0.1, **settings}) for name in names if hasattr(module, name)
    }


def where_w(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "w" in jax.tree_util.keystr(path), params)


OPTIMIZERS = {
    **named("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
    **named("fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_gradient_descent"),
    **named("optimistic_adam_v2", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "sm3", "yogi"),
    **named("acprop", "ademamix", "adopt", "dadapt_adamw", "dog", "dowg", "muon", "prodigy", module=contrib),
    **named("schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix", module=contrib),
    "cocob": contrib.cocob(),
    "noisy_sgd": optax.noisy_sgd(0.1, key=0),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "centralized": optax.chain(optax.centralize(), optax.adam(0.1)),
    "ema": optax.chain(optax.adam(0.1), optax.ema(0.9)),
    "trace": optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "add_noise": optax.chain(optax.add_noise(0.01, 0.5, key=0), optax.sgd(0.1)),
    "masked": optax.masked(optax.adam(0.1), where_w),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    "partition": optax.partition({"w": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "w", "b": "b"}),
    "mechanize": contrib.mechanize(optax.adam(0.1)),
    "flatten": optax.flatten(optax.adam(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
}

START = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.linspace(0.5, 1.0, 3)}
GRADIENTS = [
    {"w": jnp.asarray(random.normal(size=(4, 3)), jnp.float32), "b": jnp.asarray(random.normal(size=3), jnp.float32)}
    for random in map(np.random.default_rng, range(4))
]


def trained(tx, gradients, scale=1.0):
    """Parameters and state after a step with each gradient."""
    params, state = START, tx.init(START)
    for gradient in gradients:
        updates, state = tx.update(jax.tree.map(lambda g: g * scale, gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_there_are_forty():
    assert len(OPTIMIZERS) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_leaves_no_trace_in_any_optimizer(name):
    first, *others = GRADIENTS
    bad = {"w": first["w"].at[1, 2].set(jnp.inf), "b": first["b"]}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.disable_jit():
        wanted, _ = trained(OPTIMIZERS[name], [first, *others])
        scaled = dynamic_loss_scaling(OPTIMIZERS[name], initial_scale=1024.0, backoff_factor=0.5, growth_interval=100)
        params, state = START, scaled.init(START)
        for gradient in (first, bad, *others):
            scale = loss_scale_state(state).scale
            updates, state = scaled.update(jax.tree.map(lambda g, s=scale: g * s, gradient), state, params)
            params = optax.apply_updates(params, updates)
    assert loss_scale_state(state).skipped == 1
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-6)
        assert not np.array_equal(leaf, START["w" if leaf.ndim == 2 else "b"]) or name == "apply_every"
