"""examples/airbench.py.

Its optimizer: which parameters Muon is for, the size and the direction of its updates, and what SGD does with the rest.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.commands.train import run
from mpjax.config import load_config
from mpjax.config.schema import Optimizer
from mpjax.errors import UsageError
from mpjax.training.optimizer import update_rule


FOLDER = pathlib.Path(__file__).parents[2] / "examples"
RULE = f"{FOLDER / 'airbench.py'}:muon_and_sgd"

PARAMS = {"conv/kernel": jnp.zeros((3, 3, 2, 8)), "head/kernel": jnp.ones((8, 3)), "head/bias": jnp.zeros(3)}
GRADS = {
    "conv/kernel": jax.random.normal(jax.random.key(0), (3, 3, 2, 8)),
    "head/kernel": jnp.full((8, 3), 0.5),
    "head/bias": jnp.array([0.0, 1.0, -2.0]),
}


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optax divides by integer step counts; the train step allows that for its sake, as this does."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def step_of(params: Any = PARAMS, grads: Any = GRADS, weight_decay=0.0, moments: Any = "float32", **arguments) -> Any:
    arguments = {"normalise": False, "rest_learning_rate": 0.1, **arguments}
    texts = {name: str(value) for name, value in arguments.items()}
    config = Optimizer(name=RULE, learning_rate=0.1, weight_decay=weight_decay, moments=moments, arguments=texts)
    tx = update_rule(config, optax.constant_schedule(0.1), params=params)
    return tx.update(grads, tx.init(params), params)[0]


def singular_values(kernel):
    return np.linalg.svd(np.asarray(kernel).reshape(-1, kernel.shape[-1]), compute_uv=False)


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_a_filter_moves_as_far_in_every_direction_whatever_its_gradient(size):
    grads = {**GRADS, "conv/kernel": size * GRADS["conv/kernel"]}
    update = step_of(grads=grads)["conv/kernel"]
    # Five iterations leave singular values between 0.7 and 1.2.
    assert np.all((singular_values(update) > 0.07) & (singular_values(update) < 0.12))
    assert float(jnp.vdot(update, grads["conv/kernel"])) < 0


def test_a_filter_of_more_outputs_than_inputs_moves_further():
    wide = {"conv/kernel": jax.random.normal(jax.random.key(0), (1, 1, 2, 8))}
    values = singular_values(step_of(jax.tree.map(jnp.zeros_like, wide), wide)["conv/kernel"])
    assert np.all((values > 0.14) & (values < 0.24))  # twice as far: sqrt(8 / 2)


def test_the_rest_is_trained_by_sgd_at_its_own_rate():
    updates = step_of(rest_learning_rate=0.4, rest_momentum=0.5)
    np.testing.assert_allclose(updates["head/kernel"], np.full((8, 3), -0.4 * 1.5 * 0.5), rtol=1e-6)
    np.testing.assert_allclose(updates["head/bias"], [0, -0.4 * 1.5, 0.4 * 1.5 * 2], rtol=1e-6)


def test_a_rate_of_zero_has_no_multiple():
    config = Optimizer(name=RULE, learning_rate=0.0)
    with pytest.raises(UsageError, match="--optimizer.learning_rate is 0: wanted a positive rate"):
        update_rule(config, optax.constant_schedule(0.0), params=PARAMS)


def test_decay_of_filters_is_not_orthogonalized_and_biases_are_spared():
    params = {**PARAMS, "conv/kernel": jnp.ones((3, 3, 2, 8)), "head/bias": jnp.ones(3)}
    without, found = (step_of(params, weight_decay=decay, rest_momentum=0.0) for decay in (0.0, 0.5))
    np.testing.assert_allclose(
        found["conv/kernel"] - without["conv/kernel"], -0.1 * 0.5 * np.ones((3, 3, 2, 8)), rtol=1e-4
    )
    assert found["head/bias"].tolist() == without["head/bias"].tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_filters_are_scaled_to_the_norm_of_their_outputs_before_the_update_and_do_not_decay(dtype):
    # Of 144 values of 100: the sum of their squares overflows float16.
    params = jax.tree.map(lambda p: p.astype(dtype), {**PARAMS, "conv/kernel": jnp.full((3, 3, 2, 8), 100.0)})
    plain = step_of(params)
    found = step_of(params, normalise=True, weight_decay=0.5, rest_momentum=0.0)["conv/kernel"]
    kernel = params["conv/kernel"].astype(jnp.float32) + (found - plain["conv/kernel"]).astype(jnp.float32)
    np.testing.assert_allclose(
        kernel, np.full((3, 3, 2, 8), (8 / 144) ** 0.5), atol=1e-5 if dtype == jnp.float32 else 0.07
    )


def test_a_filter_of_zeros_has_no_norm_to_scale():
    found, plain = step_of(normalise=True), step_of()
    for name in PARAMS:
        np.testing.assert_array_equal(found[name], plain[name])


def test_a_model_without_convolutions_is_an_error():
    params = {"head/kernel": jnp.ones((8, 3))}
    with pytest.raises(UsageError, match="muon_and_sgd: the model has no convolution.*write adamw or sgd"):
        step_of(params, params)


def test_with_bfloat16_moments_a_step_is_that_of_float32_within_a_percent():
    full, half = (step_of(moments=moments) for moments in ("float32", "bfloat16"))
    for name in PARAMS:
        np.testing.assert_allclose(half[name], full[name], rtol=0.01, atol=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    common = "--task segmentation --data.name digits_canvas --model.name unet --model.width 4 --model.depth 1 "
    common += f"--optimizer.name {RULE} --precision.policy bfloat16 --report.no_tensorboard "
    common += "--report.no_plot --optimizer.schedule constant --optimizer.warmup 0 --data.batch_size 32 --output_dir "

    def trained(folder, *arguments):
        return run(load_config([*f"{common}{tmp_path / folder}".split(), *arguments]))

    whole = trained("whole", "--steps", "4")
    trained("parts", "--steps", "2")
    again = trained("parts", "--steps", "4", "--resume")
    assert again["steps"] == 4
    assert again["test/loss"] == whole["test/loss"]
