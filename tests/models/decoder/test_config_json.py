"""config.json: published ones become models of their published size, and what is not known is an error."""

import json
import pathlib

import jax
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import LayerKind, LinearScaling, Llama3Scaling, Rope, YarnScaling
from mpjax.models.decoder import Decoder, read_settings, settings_of


TINY = pathlib.Path(__file__).with_name("tiny")
SMALL = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def sizes(vocabulary, width, hidden, layers, heads, key_heads, length, **others):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = (vocabulary, width, hidden, layers, heads)
    known = dict(zip(names, values, strict=True))
    return {**known, "num_key_value_heads": key_heads, "max_position_embeddings": length, **others}


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED = {
    "Llama 3.2 1B": (
        sizes(128_256, 2048, 8192, 16, 32, 8, 131_072, model_type="llama", head_dim=64, hidden_act="silu")
        | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True, "pretraining_tp": 1},
        1_235_814_400,
    ),
    "SmolLM2 135M": (
        sizes(49_152, 576, 1536, 30, 9, 3, 8192, model_type="llama", hidden_act="silu", is_llama_config=True)
        | {"rope_interleaved": False, "rope_theta": 100_000, "tie_word_embeddings": True, "rope_scaling": None},
        134_515_008,
    ),
    "Mistral 7B": (
        sizes(32_000, 4096, 14_336, 32, 32, 8, 32_768, model_type="mistral", hidden_act="silu", sliding_window=4096),
        7_241_732_096,
    ),
    "Qwen2 0.5B": (
        sizes(151_936, 896, 4864, 24, 14, 2, 131_072, model_type="qwen2", hidden_act="silu", sliding_window=131_072)
        | {"max_window_layers": 24, "use_sliding_window": False, "tie_word_embeddings": True},
        494_032_768,
    ),
    "Qwen3 0.6B": (
        sizes(151_936, 1024, 3072, 28, 16, 8, 40_960, model_type="qwen3", hidden_act="silu", head_dim=128)
        | {"attention_bias": False, "rope_theta": 1_000_000, "sliding_window": None, "tie_word_embeddings": True},
        596_049_920,
    ),
    "Gemma 2 2B": (
        sizes(256_000, 2304, 9216, 26, 8, 4, 8192, model_type="gemma2", hidden_activation="gelu_pytorch_tanh")
        | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        2_614_341_888,
    ),
    "Gemma 3 1B": (
        sizes(262_144, 1152, 6912, 26, 4, 1, 32_768, model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh")
        | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6}
        | {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "cache_implementation": "hybrid"},
        999_885_952,
    ),
    "SmolLM3 3B": (
        sizes(128_256, 2048, 11_008, 36, 16, 4, 65_536, model_type="smollm3", hidden_act="silu", rope_theta=5e6)
        | {"no_rope_layer_interval": 4, "use_sliding_window": False, "pretraining_tp": 2, "mlp_bias": False},
        3_075_098_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_number_of_parameters(name):
    config, count = PUBLISHED[name]
    settings = settings_of(config)
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


def test_a_file_becomes_settings():
    settings = read_settings(TINY)
    local, whole = LayerKind(rope=Rope(theta=1e4), window=4), LayerKind(rope=Rope(theta=1e6))
    assert settings.layers == (local, whole, local)
    assert (settings.heads, settings.key_heads, settings.head_features) == (8, 4, 16)
    assert (settings.norm_offset, settings.embedding_scale, settings.score_scale) == (1.0, 8.0, 0.25)
    assert (settings.norms_after, settings.norms_of_heads, settings.tied) == (True, True, True)
    assert (settings.score_cap, settings.logit_cap, settings.activation) == (None, None, "tanh_gelu")


def test_missing_keys_have_the_defaults_of_transformers():
    settings = settings_of(SMALL)
    assert (settings.key_heads, settings.head_features, settings.epsilon) == (4, 4, 1e-6)
    assert (settings.tied, settings.qkv_bias, settings.layers[0]) == (False, False, LayerKind())
    gemma = settings_of(SMALL | {"model_type": "gemma2", "num_key_value_heads": 2})
    assert (gemma.score_cap, gemma.logit_cap, gemma.tied, gemma.head_features) == (50.0, 30.0, True, 256)
    assert [kind.window for kind in gemma.layers] == [4096, None]
    assert (settings.activation, gemma.activation) == ("silu", "tanh_gelu")


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, [None, 3]),
        ({"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}, [None, None]),
        (
            {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
            [3, None],
        ),
    ],
)
def test_windows_of_qwen(change, windows):
    settings = settings_of(SMALL | {"model_type": "qwen3", "num_key_value_heads": 2} | change)
    assert [kind.window for kind in settings.layers] == windows


def test_layers_of_smollm_3_without_positions():
    settings = settings_of(SMALL | {"model_type": "smollm3", "num_hidden_layers": 4})
    assert [kind.rope for kind in settings.layers] == [Rope(theta=2e6)] * 3 + [None]


ROPE = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({"rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(scaling=LinearScaling(factor=2))),
        ({"rope_scaling": LLAMA3}, Rope(scaling=Llama3Scaling(factor=32.0, low=1.0, high=4.0, length=8192))),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, Rope(scaling=YarnScaling(factor=4.0, length=64))),
    ],
)
def test_positions_in_the_old_form_and_in_the_new_one(change, rope):
    assert settings_of(SMALL | change).layers[0].rope == rope


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sliding_chunks": 3, "router": {"top": 2}}, 'does not know sliding_chunks 3, router {"top": 2}: a model'),
        ({"model_type": "mamba"}, 'model_type is "mamba": wanted llama or mistral or qwen2'),
        ({"architectures": ["LlamaForTokenClassification"]}, r'wanted \["LlamaForCausalLM"\] for llama'),
        ({"hidden_act": "relu"}, 'hidden_act is "relu": wanted silu or swish or gelu_pytorch_tanh'),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1: the decoder of mpjax has 0.0"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"attention_bias": "no"}, 'attention_bias is "no": wanted true or false'),
        ({"vocab_size": 20.5}, "vocab_size is 20.5: wanted a whole number"),
        ({"vocab_size": True}, "vocab_size is true: wanted a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0: wanted at least 1"),
        ({"hidden_size": 18}, "hidden_size is 18: wanted a multiple of num_attention_heads, 4"),
        ({"num_key_value_heads": 3}, "4 heads cannot have 3 key and value heads"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling.type is "dynamic": wanted default or'),
        ({"rope_scaling": ROPE | {"beta": 1}}, "does not know rope_scaling.beta 1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing: wanted a number"),
        ({"rope_scaling": ROPE, "rope_parameters": ROPE}, "wanted it or rope_parameters, not both"),
        ({"rope_theta": 2.0, "rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.rope_theta is 1.0: and beside"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, 'does not know quantization_config {"bits": 4}'),
        ({"sliding_window": 3}, "does not know sliding_window 3"),
    ],
)
def test_what_is_not_understood_is_an_error(change, says):
    with pytest.raises(UsageError, match=says):
        settings_of(SMALL | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["full_attention"]}, "wanted full_attention or sliding_attention for each of 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "wanted full_attention or sliding_attention for"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "sliding_window is null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"hidden_act": "silu"}, 'hidden_act is "silu"'),
        ({"sliding_window_size": 5}, "sliding_window_size is 5: the decoder of mpjax has 3 only"),
    ],
)
def test_what_gemma_cannot_have_is_an_error(change, says):
    gemma = {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 3}
    with pytest.raises(UsageError, match=says):
        settings_of(SMALL | gemma | {"num_key_value_heads": 2} | change)


@pytest.mark.parametrize("key", sorted(SMALL))
def test_a_missing_size_is_an_error(key):
    with pytest.raises(UsageError, match=f"{key} is missing: wanted"):
        settings_of({name: value for name, value in SMALL.items() if name != key})


@pytest.mark.parametrize(("text", "says"), [("{", "cannot be read"), ("[]", "wanted a JSON object, got list")])
def test_an_error_names_the_file(tmp_path, text, says):
    with pytest.raises(UsageError, match=f"there is no {tmp_path}/config.json"):
        read_settings(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=f"{tmp_path}/config.json.*{says}"):
        read_settings(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"odd": 1}))
    with pytest.raises(UsageError, match=f"{tmp_path}/config.json: mpjax does not know odd 1"):
        read_settings(tmp_path)


def test_windows_and_caps_are_those_that_transformers_uses():
    """Its Qwen 3 MoE gives all layers the window, and its Gemma 3 does not use a cap of the scores."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 3}
    moe = SMALL | experts | {"model_type": "qwen3_moe", "max_window_layers": 1}
    assert [layer.window for layer in settings_of(moe).layers] == [3, 3]
    assert [layer.window for layer in settings_of(moe | {"use_sliding_window": False}).layers] == [None, None]
    gemma = SMALL | {"model_type": "gemma3_text", "sliding_window": 3, "_sliding_window_pattern": 2}
    assert [layer.window for layer in settings_of(gemma).layers] == [3, 3]  # each sixth sees all
    with pytest.raises(UsageError, match="attn_logit_softcapping is 2.0: .* has null only"):
        settings_of(gemma | {"attn_logit_softcapping": 2.0})
