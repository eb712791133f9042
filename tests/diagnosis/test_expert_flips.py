"""Tokens whose experts change places under another policy, counted layer by layer."""

import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax.diagnosis import expert_flips
from mpjax.errors import UsageError
from mpjax.models.decoder import Decoder, settings_of


def model():
    """Its router reads the first feature alone; the features of tokens 0 and 1 are (1, 1) and (1, -1), and so on."""
    config = {
        "model_type": "mixtral",
        "vocab_size": 4,
        "hidden_size": 2,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 8,
    }
    model = Decoder(settings_of(config), rngs=nnx.Rngs(0))
    model.tokens.embedding.set_value(jnp.asarray([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]))
    block = model.blocks[0]
    block.attention.out.kernel.set_value(jnp.zeros_like(block.attention.out.kernel[...]))  # each token for itself
    # A first feature of 1 gives the logits 1, 1.001 and 0.25 at most: in bfloat16, the first two are equal. One of -1
    # gives -1, -1.001 and 0.25 at most.
    block.mlp.router.kernel.set_value(jnp.asarray([[1.0, 1.001, 0.0], [0.0, 0.0, 0.25]]))
    return model


IN_BFLOAT16 = mpjax.Policy("float32", "float32", "float32", rules={"type:Router": "bfloat16"})


def test_flips_are_tokens_with_another_set_of_experts():
    flips = expert_flips(model(), jnp.asarray([[0, 1, 2, 3]]), "float32", IN_BFLOAT16)
    assert (flips.tokens, flips.flipped, flips.anywhere) == (4, 0.5, 0.5)  # tokens 0 and 1
    (layer,) = flips.layers
    assert layer.flipped == 0.5
    assert 0.0003 < layer.flipped_margin < 0.0006  # 0.001 p (1 - p) and less
    assert "layer 0: 50.00% flip" in str(flips)


def test_padding_is_not_compared():
    flips = expert_flips(model(), jnp.asarray([[2, 3, 0, 1]]), "float32", IN_BFLOAT16, lengths=jnp.asarray([2]))
    assert (flips.tokens, flips.flipped) == (2, 0.0)


def test_a_router_in_float32_does_not_flip_under_a_half_precision_policy():
    assert expert_flips(model(), jnp.asarray([[0, 1, 2, 3]]), "float32", "mixed_bfloat16").flipped == 0.0


def test_a_model_without_experts_is_refused():
    with pytest.raises(UsageError, match="MLP has no experts whose choice could flip"):
        expert_flips(type("MLP", (), {})(), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(UsageError, match="no tokens to compare"):
        expert_flips(model(), jnp.zeros((1, 0), jnp.int32))
