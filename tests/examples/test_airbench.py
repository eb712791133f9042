"""examples/airbench.py: its first layer and initial filters, its views in evaluation, the updates of its optimizer."""

import functools
import importlib.util
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.commands import build_run, fresh_state, run, with_parts
from mpjax.config import Optimizer, from_toml, load_config, to_toml
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.loop import read_checkpoint
from mpjax.precision import apply_policy, audit, get_policy
from mpjax.training import update_rule


FOLDER = pathlib.Path(__file__).parents[2] / "examples"
_SPEC: Any = importlib.util.spec_from_file_location("airbench", FOLDER / "airbench.py")
airbench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(airbench)
RULE = f"{FOLDER / 'airbench.py'}:muon_and_sgd"


def small(*arguments):
    """The settings of the example on 16 generated images, in float32, and its model with few channels."""
    flags = "--data.name synthetic:12x12x3:5 --data.batch_size 8 --data.eval_batch_size 8 --training.steps_per_call 1 "
    flags += "--steps 3 --loop.eval_every 3 --loop.save_every 3 --report.no_tensorboard --report.no_plot "
    flags += "--precision.policy float32 --optimizer.arguments rest_learning_rate 1.0"
    config = load_config(["--config", str(FOLDER / "airbench.toml"), *flags.split(), *arguments])
    return config, {"model": functools.partial(airbench.Airbench, width=4), "optimizer": airbench.muon_and_sgd}


def test_its_settings_name_its_parts_and_round_trip(tmp_path):
    config = from_toml(FOLDER / "airbench.toml")
    assert config.model.name == "examples/airbench.py:Airbench"
    assert config.optimizer.name == "examples/airbench.py:muon_and_sgd"
    assert callable(airbench.Airbench)
    assert callable(airbench.muon_and_sgd)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "again.toml") == config


def test_the_kernel_of_a_new_run_whitens_its_images(tmp_path):
    config, parts = small("--output_dir", str(tmp_path / "run"))
    built = build_run(with_parts(config, **parts))
    kernel = np.asarray(fresh_state(built).stats["whitening/kernel"]).reshape(12, 24)[:, :12]
    x = np.stack([example["image"] for example in built.source.train.__getitems__(range(16))]) / 255
    x = (x - np.array(config.data.mean)) / np.array(config.data.std)
    patches = np.concatenate([x[:, i : i + 2, j : j + 2].reshape(16, 12) for i in range(11) for j in range(11)])
    variances = np.linalg.eigvalsh(patches.T @ patches / len(patches))
    whitened = (patches @ kernel).T @ (patches @ kernel) / len(patches)
    np.testing.assert_allclose(whitened, np.diag(variances / (variances + 5e-4)), atol=1e-4)


@pytest.mark.slow
def test_it_trains_and_its_kernel_stays_as_it_was(tmp_path):
    config, parts = small("--output_dir", str(tmp_path / "run"))
    summary = run(config, **parts)
    assert (summary["steps"], summary["parameters"]) == (3, 8672)
    assert summary["train/loss"] == pytest.approx(1.5632, abs=0.01)
    _, arrays, _ = read_checkpoint(tmp_path / "run" / "checkpoints")
    (kernel,) = (value for name, value in arrays.items() if name.endswith("whitening/kernel"))
    np.testing.assert_array_equal(kernel, fresh_state(build_run(with_parts(config, **parts))).stats["whitening/kernel"])


@pytest.mark.parametrize("preset", ["mixed_float16", "bfloat16"])
def test_its_products_are_in_half_precision_and_nothing_else_is_widened(preset):
    policy = get_policy(preset)

    def make():
        model = airbench.Airbench(labelled_images(3, (9, 9, 1)), rngs=nnx.Rngs(0), width=4)
        apply_policy(model, policy)
        return model

    def gradient(model, x):
        return nnx.grad(lambda model: jnp.mean(model(x)))(model)

    model, x = nnx.eval_shape(make), jax.ShapeDtypeStruct((4, 9, 9, 1), policy.compute_dtype)
    backward = audit(gradient, model, x, policy=policy)
    model.eval()
    for report in (backward, audit(lambda model, x: model(x), model, x, policy=policy)):
        report.assert_clean()
        assert {row.dtype for row in report if row.kind == "low"} == {np.dtype(policy.compute_dtype)}


def images(count=64):
    """Neighbouring pixels are alike, as in photographs."""
    noise = np.random.default_rng(0).standard_normal((count, 6, 6, 3)).astype(np.float32)
    return noise.cumsum(1).cumsum(2)


def whitened(x):
    model = airbench.Whitening(3)
    model.kernel[...] = jnp.asarray(model.from_images(x)["kernel"])
    return np.asarray(model(jnp.asarray(x))).reshape(-1, 24)


def test_patches_have_no_correlation_and_equal_size():
    y = whitened(images())
    assert y.shape == (64 * 5 * 5, 24)
    np.testing.assert_allclose(y[:, :12].T @ y[:, :12] / len(y), np.eye(12), atol=0.02)
    assert np.array_equal(y[:, 12:], -y[:, :12])


def test_components_without_variance_stay_finite():
    assert np.isfinite(whitened(np.full((2, 6, 6, 3), 0.5, np.float32))).all()


def test_before_it_sees_images_it_copies_the_pixels_of_a_patch():
    x = jnp.asarray(images(1)[:, :2, :2])
    y = airbench.Whitening(3)(x).ravel()
    assert np.array_equal(y, jnp.concatenate([x.ravel(), -x.ravel()]))


def test_only_the_bias_of_the_first_layer_is_trained():
    model = airbench.Whitening(3)
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))] == [(24,)]
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat))] == [(2, 2, 3, 24)]


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 3), (3, 2)])
def test_a_filter_begins_by_passing_its_inputs_on(inputs, outputs):
    kernel = airbench.dirac(nnx.initializers.ones)(jax.random.key(0), (3, 3, inputs, outputs))
    copied = min(inputs, outputs)
    assert np.array_equal(kernel[1, 1, :, :copied], np.eye(inputs, copied))
    assert float(jnp.sum(kernel[..., :copied])) == copied
    assert np.all(np.asarray(kernel[..., copied:]) == 1)


def test_it_has_as_many_parameters_as_published():
    model = nnx.eval_shape(lambda: airbench.Airbench(labelled_images(10, (32, 32, 3)), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 1_971_352


def test_images_that_are_too_small_are_an_error():
    model = nnx.eval_shape(lambda: airbench.Airbench(labelled_images(3, (8, 8, 1)), rngs=nnx.Rngs(0), width=4))
    with pytest.raises(
        UsageError, match="airbench needs images of 9x9 pixels or more, got 8x8; write --data.image_size"
    ):
        nnx.eval_shape(lambda model, x: model(x), model, jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32))


IMAGES = jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 4, 1)
MIRRORED = [[3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8]]


def test_shifted_views_count_half_and_have_reflected_edges():
    found = [(weight, np.asarray(view)[0, :, :, 0].tolist()) for weight, view in airbench.views(IMAGES)]
    assert [weight for weight, _ in found] == [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert found[:2] == [(0.25, np.arange(12).reshape(3, 4).tolist()), (0.25, MIRRORED)]
    assert found[2][1] == [[5, 4, 5, 6], [1, 0, 1, 2], [5, 4, 5, 6]]  # down to the right
    assert found[4][1] == [[5, 6, 7, 6], [9, 10, 11, 10], [5, 6, 7, 6]]  # up to the left
    for first in (2, 4):
        assert found[first + 1][1] == [row[::-1] for row in found[first][1]]


def test_logits_of_views_are_averaged_by_weight():
    def first_two(images):
        return images[:, 0, :2, 0]

    # Of the first row [0 1 2 3]: half of (0 + 3) / 2, a quarter of (5 + 6) / 2 and a quarter of (5 + 6) / 2.
    expected = [0.5 * 1.5 + 0.25 * 5.5 + 0.25 * 5.5, 0.5 * 1.5 + 0.25 * 4.5 + 0.25 * 6.5]
    np.testing.assert_allclose(airbench.mean_logits(first_two, airbench.views(IMAGES)), [expected], rtol=1e-6)


def test_logits_in_half_precision_are_averaged_in_float32():
    two = [(0.5, jnp.full((1, 1), value, jnp.float16)) for value in (2048, 2050)]
    logits = airbench.mean_logits(lambda x: x, two)
    assert (logits.dtype, logits.tolist()) == (jnp.float32, [[2049.0]])  # which float16 does not have


@pytest.mark.slow
def test_evaluation_averages_views_and_training_does_not():
    model = airbench.Airbench(labelled_images(3, (9, 9, 1)), rngs=nnx.Rngs(0), width=4)
    x = jax.random.normal(jax.random.key(0), (2, 9, 9, 1))
    model.eval()
    np.testing.assert_array_equal(model(x), airbench.mean_logits(model.logits, airbench.views(x)))
    assert not np.allclose(model(x), model.logits(x), rtol=1e-3)
    model.train()
    np.testing.assert_array_equal(model(x), model.logits(x))


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

    whole = trained("whole", "--steps", "4", "--loop.save_every", "2", "--loop.keep", "9")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    again = trained("parts", "--resume")
    assert again["steps"] == 4
    assert again["test/loss"] == whole["test/loss"]
