"""What files say about two towers is understood or refused; the temperature stays in float32, within its limit."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.config import Model
from mpjax.data import Image, Tokens
from mpjax.errors import UsageError
from mpjax.models import advice_on
from mpjax.models.image_text import ImageText, settings_of
from mpjax.precision import apply_policy, get_policy
from mpjax.training import image_text


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION = SIZES | {"image_size": 8, "patch_size": 4}
TEXT = SIZES | {"vocab_size": 20, "max_position_embeddings": 5}
CLIP = {"model_type": "clip", "vision_config": VISION, "text_config": TEXT, "projection_dim": 8}
SIGLIP = {"model_type": "siglip", "vision_config": VISION, "text_config": TEXT}


def network(config) -> Any:
    return ImageText(settings_of(config), image_shape=(8, 8, 3), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (CLIP | {"rope": 1}, "does not know rope 1"),
        (CLIP | {"text_config": TEXT | {"use_head": 1}}, "does not know text_config.use_head 1"),
        (CLIP | {"text_config": TEXT | {"attention_dropout": 0.1}}, "text_config.attention_dropout is 0.1"),
        (CLIP | {"text_config": 3}, "text_config is 3: wanted an object"),
        (SIGLIP | {"vision_config": VISION | {"vision_use_head": False}}, "vision_config.vision_use_head is false"),
        (SIGLIP | {"text_config": TEXT | {"projection_size": 8}}, "projection_size is 8: wanted 16"),
        ({"model_type": "clip_vision_model"}, "model_type is .clip_vision_model.: wanted clip or siglip"),
    ],
)
def test_what_is_not_understood_is_an_error(config, says):
    with pytest.raises(UsageError, match=says):
        settings_of(config)


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"model_type": "clip", "vision_config": {"patch_size": 32}}, 151_277_313),
        ({"model_type": "siglip"}, 203_155_970),
    ],
    ids=["clip-vit-base-patch32", "siglip-base-patch16-224"],
)
def test_published_sizes_have_their_numbers_of_parameters(config, numbers):
    model = nnx.eval_shape(lambda: ImageText(settings_of(config), image_shape=(224, 224, 3), rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == numbers


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "O3", "mixed_float16"])
def test_temperature_and_bias_are_float32_by_a_visible_rule(policy):
    model = network(SIGLIP)
    report = apply_policy(model, policy)
    (row,) = (row for row in report if row.path == "temperature")
    assert (str(row.param_dtype), row.rule) == ("float32", "type:Temperature")
    assert model.temperature.scale[...].dtype == model.temperature.bias[...].dtype == jnp.float32
    assert model.temperature(jnp.ones((1, 1), jnp.bfloat16)).dtype == jnp.float32


def test_a_factor_is_at_most_100_and_its_gradient_can_lower_it():
    model = network(CLIP)
    np.testing.assert_allclose(jnp.exp(model.temperature.scale[...]), 14.285, rtol=1e-3)  # 1 / 0.07
    model.temperature.scale[...] = jnp.full((1,), math.log(100) + 1)
    np.testing.assert_allclose(model.temperature(jnp.ones((1, 1))), 100, rtol=1e-6)
    gradient = nnx.grad(lambda temperature: jnp.sum(temperature(jnp.ones((1, 1)))))(model.temperature)
    np.testing.assert_allclose(gradient.scale[...], 100, rtol=1e-6)


class Fixed(nnx.Module):
    """Vectors that are given, and the temperature of a network."""

    def __init__(self, vectors, temperature):
        self.vectors = nnx.data(jnp.asarray(vectors))
        self.temperature = temperature

    def __call__(self, images, tokens, lengths):
        return self.vectors


@pytest.mark.parametrize(("config", "losses"), [(CLIP, [0.126928, 0.126928]), (SIGLIP, [0.693147, 0.693147])])
def test_losses_and_recalls_of_two_pairs(config, losses):
    """Images and texts are 1, 0 and 0, 1: a factor of 2 makes logits of 2 and 0; with a bias of 0, sigmoids."""
    model = network(config)
    temperature = model.temperature
    temperature.scale[...] = jnp.full((1,), math.log(2))
    if temperature.bias is not None:
        temperature.bias[...] = jnp.zeros(1)
        losses = [math.log1p(math.exp(-2)) + math.log(2)] * 2
    pairs = np.asarray([[[1, 0], [3, 0]], [[0, 2], [0, 1]]], np.float32)
    batch = {"image": np.zeros((2, 8, 8, 3), np.float32), "tokens": np.ones((2, 5), np.int32)}
    batch |= {"length": np.full(2, 5, np.int32), "weight": np.ones(2, np.float32)}
    objective = image_text(get_policy("float32"))
    values: Any = objective(Fixed(pairs, temperature), batch, None)
    np.testing.assert_allclose(values["loss"], losses, rtol=1e-5)
    assert values["image_to_text"].tolist() == values["text_to_image"].tolist() == [1, 1]
    swapped: Any = objective(Fixed(pairs[:, ::-1] * [[[1, 1]], [[-1, -1]]], temperature), batch, None)
    assert swapped["image_to_text"].tolist() == [1, 1]
    # An example that fills a batch up is no candidate.
    alone: Any = objective(Fixed(pairs, temperature), batch | {"weight": np.asarray([1, 0], np.float32)}, None)
    own = 0 if temperature.bias is None else math.log1p(math.exp(-2))
    np.testing.assert_allclose(alone["loss"][0], own, atol=1e-6)


@pytest.mark.parametrize(("config", "length", "told"), [(SIGLIP, 4, 1), (SIGLIP, 5, 0), (CLIP, 4, 0)])
def test_a_run_is_told_that_siglip_reads_another_position_of_texts(config, length, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = {"image": Image((8, 8, 3)), "tokens": Tokens(length, 20)}
    says = f"SigLIP reads the last position of a text, padding or not, which is 5 in {tmp_path} and 4 here"
    advice = advice_on(Model(name=f"hf:{tmp_path}"), fields)
    says = f"{says}: with its weights, write --data.length 5"
    assert [line for line in advice if line.startswith("SigLIP")] == [says] * told
