"""ModernBERT: what its config.json says, what a token sees, and its blocks as one loop and recomputed."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax import diagnose, models
from mpjax.config import Model
from mpjax.errors import UsageError
from mpjax.models import (
    LayerKind,
    LinearScaling,
    Rope,
    add_lora,
    apart,
    apply_remat,
    blocks_of,
    merge_lora,
    stacks_of,
)
from mpjax.models.encoder import (
    ModernBERT,
    Sentence,
    export_encoder,
    load_encoder,
    make_classifier,
    read_settings,
    settings_of,
)
from mpjax.models.pretrained import export_safetensors
from mpjax.precision import name_scopes
from mpjax.training import take_apart


TINY = json.loads((pathlib.Path(__file__).with_name("modernbert") / "config.json").read_text())
WITHOUT = {key: value for key, value in TINY.items() if "rope" not in key and key != "global_attn_every_n_layers"}
BASE = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "reference_compile": None,
    "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.48.0",
    "vocab_size": 50368,
}
LARGE = BASE | {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("config", "whole", "with_two_classes"),
    [(BASE, 149_014_272, 149_606_402), (LARGE, 394_781_696, 395_833_346)],
    ids=["base", "large"],
)
def test_published_files_are_models_of_their_published_size(config, whole, with_two_classes):
    settings = settings_of(config)

    def size(make):
        return sum(x.size for x in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param)))

    assert size(lambda: ModernBERT(settings, rngs=nnx.Rngs(0))) == whole
    assert size(lambda: make_classifier(settings, num_classes=2, rngs=nnx.Rngs(0))) == with_two_classes
    assert settings.layers[:4] == (
        LayerKind(rope=Rope(theta=160_000.0)),
        *[LayerKind(rope=Rope(theta=10_000.0), window=65)] * 2,
        LayerKind(rope=Rope(theta=160_000.0)),
    )


def test_files_of_newer_transformers_say_the_same():
    newer = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 160000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    assert settings_of(WITHOUT | newer) == settings_of(TINY) == settings_of(WITHOUT) == settings_of(TINY | newer)
    newer["rope_parameters"]["full_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    assert settings_of(WITHOUT | newer).layers[0].rope == Rope(theta=5.0, scaling=LinearScaling(factor=2.0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, 'does not know hidden_act "gelu"'),
        ({"hidden_activation": "relu"}, 'hidden_activation is "relu": wanted gelu or'),
        ({"classifier_activation": "silu"}, 'classifier_activation is "silu": wanted gelu or'),
        ({"classifier_pooling": "max"}, 'classifier_pooling is "max": wanted cls or mean'),
        ({"norm_bias": 1}, "norm_bias is 1: wanted true or false"),
        ({"attention_bias": None}, "attention_bias is null: wanted true or false"),
        ({"decoder_bias": "no"}, 'decoder_bias is "no": wanted true or false'),
        ({"norm_eps": 0.0}, "norm_eps is 0.0: wanted a positive number"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06: and norm_eps, which transformers reads, is 1e-05"),
        ({"mlp_dropout": 1.0}, "mlp_dropout is 1.0: wanted a number of at least 0 and below 1"),
        ({"embedding_dropout": -0.1}, "embedding_dropout is -0.1: wanted a number of at least 0"),
        ({"local_attention": 0}, "local_attention is 0: wanted at least 1"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0: wanted at least 1"),
        ({"layer_types": ["full_attention"]}, "wanted full_attention or sliding_attention for each of 3 layers"),
        ({"layer_types": ["full_attention"] * 3}, "global_attn_every_n_layers is 3: and layer_types has another order"),
        ({"global_rope_theta": 0.0}, "global_rope_theta is 0.0: wanted a positive number"),
        ({"local_rope_theta": None}, "local_rope_theta is null: wanted a number"),
        ({"rope_theta": 1e4}, "does not know rope_theta 10000.0"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling is .*: the encoder of mpjax has null",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "does not know rope_parameters.rope_theta 10000.0"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention.rope_theta is 10000.0: and beside it global_rope_theta is 160000.0",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            'rope_type is "dynamic": wanted',
        ),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
        ({"architectures": ["BertModel"]}, "wanted one class of ModernBert"),
        ({"num_attention_heads": 5}, "cannot have 5 heads"),
        ({"hidden_size": 12}, "a head of 3 features cannot be rotated"),
    ],
)
def test_what_is_not_understood_is_an_error(change, says):
    with pytest.raises(UsageError, match=says):
        settings_of(TINY | change)


TOKENS = jax.random.randint(jax.random.key(0), (2, 10), 0, 260)
OTHER = TOKENS.at[:, 4].set((TOKENS[:, 4] + 1) % 260)


@nnx.jit
def features(model, tokens, lengths=None):
    return model.features(tokens, lengths)


@pytest.mark.parametrize(
    ("kinds", "seen"),
    [
        (["sliding"], [2, 3, 4, 5, 6]),
        (["sliding", "sliding"], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (["sliding", "full"], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_token_sees_half_of_local_attention_on_either_side(kinds, seen):
    layers = {"layer_types": [f"{kind}_attention" for kind in kinds], "num_hidden_layers": len(kinds)}
    for scan in (False, True):
        model = ModernBERT(settings_of(WITHOUT | layers), scan_blocks=scan, rngs=nnx.Rngs(0))
        before, after = features(model, TOKENS), features(model, OTHER)
        assert np.flatnonzero(np.any(np.asarray(before != after), axis=(0, 2))).tolist() == seen


def test_padding_changes_nothing():
    model = ModernBERT(settings_of(TINY), rngs=nnx.Rngs(0))
    before, after = (features(model, tokens, jnp.asarray([4, 10], jnp.int32)) for tokens in (TOKENS, OTHER))
    assert np.array_equal(before[0, :4], after[0, :4])
    np.testing.assert_allclose(before[0, :4], features(model, TOKENS[:1, :4])[0], atol=1e-5)


DROPOUT = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout")


@pytest.mark.parametrize("name", DROPOUT)
def test_every_dropout_is_in_training_alone(name):
    model = make_classifier(settings_of(TINY | {name: 0.5}), num_classes=3, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda model: model(TOKENS))
    model.train()
    assert not np.allclose(call(model), call(model))
    model.eval()
    assert np.array_equal(call(model), call(model))


def loss_and_gradients(*, scan=False, remat="none", policy="float32"):
    model = make_classifier(settings_of(TINY), num_classes=3, scan_blocks=scan, rngs=nnx.Rngs(0))
    name_scopes(model)
    mpjax.apply_policy(model, policy)
    apply_remat(model, remat)
    structure, params, _ = take_apart(model)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = structure.assemble(params, {})(TOKENS, jnp.asarray([7, 10], jnp.int32))
        return jnp.mean(jnp.square(logits))

    value, grads = loss(params)
    return float(value), apart(grads, stacks_of(model))


@pytest.fixture(scope="module")
def plain():
    return loss_and_gradients()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"scan": True},
        {"scan": True, "remat": "full"},
        {"remat": "full"},
        {"remat": "dots"},
    ],
    ids=str,
)
def test_a_loop_and_recomputed_activations_change_nothing(plain, options):
    value, grads = loss_and_gradients(**options)
    assert value == pytest.approx(plain[0], rel=1e-6)
    assert grads.keys() == plain[1].keys()
    for path, expected in plain[1].items():
        np.testing.assert_allclose(grads[path], expected, atol=2e-6 * float(jnp.max(jnp.abs(expected))) + 1e-9)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_in_half_precision_loss_and_gradients_are_near(plain, policy):
    value, grads = loss_and_gradients(policy=policy, scan=True)
    assert value == pytest.approx(plain[0], rel=0.03)
    for path, expected in plain[1].items():
        largest = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(grads[path], expected, atol=0.06 * largest + 1e-9, err_msg=path)


def test_all_blocks_are_alike_and_every_layer_is_in_one():
    model = ModernBERT(settings_of(TINY), rngs=nnx.Rngs(0))
    assert list(blocks_of(model)) == ["blocks/0", "blocks/1", "blocks/2"]
    assert len(add_lora(model, ["blocks/*"], rank=2, rngs=nnx.Rngs(0))) == 3 * 7


def test_adapters_are_merged_into_fused_matrices(tmp_path):
    model = ModernBERT(settings_of(TINY), rngs=nnx.Rngs(0))
    export_safetensors(model, tmp_path / "before.safetensors", layout="huggingface")
    add_lora(model, ["blocks/*/attention/key", "blocks/*/mlp/gate"], rank=2, rngs=nnx.Rngs(0))
    for block in model.blocks:
        for layer in (block.attention.key, block.mlp.gate):
            layer.lora_b[...] = jnp.ones_like(layer.lora_b[...])
    merge_lora(model)
    export_safetensors(model, tmp_path / "after.safetensors", layout="huggingface")
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers.{number}.{name}.weight" for number in range(3) for name in ("attn.Wqkv", "mlp.Wi")}
    for name, rows in (("attn.Wqkv", slice(64, 128)), ("mlp.Wi", slice(0, 48))):
        rest = np.delete(before[f"layers.1.{name}.weight"] != after[f"layers.1.{name}.weight"], rows, axis=0)
        assert not rest.any()


@pytest.fixture
def folder(tmp_path):
    """A folder with weights of the tiny encoder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    model = ModernBERT(settings_of(TINY), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


def test_heads_of_pretraining_are_not_read_but_by_a_classifier(folder):
    """The head of pre-training is a classifier's hidden layer, as for transformers."""
    rows = load_file(folder / "model.safetensors")
    rows = {f"model.{name}": row for name, row in rows.items()}
    rows |= {"head.dense.weight": np.full((64, 64), 2.0, np.float32), "head.norm.weight": np.full(64, 3.0, np.float32)}
    save_file(rows | {"decoder.bias": np.zeros(260, np.float32)}, folder / "model.safetensors")
    assert np.array_equal(load_encoder(folder).tokens.embedding[...], rows["model.embeddings.tok_embeddings.weight"])
    model = make_classifier(read_settings(folder), num_classes=3, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match=r"missing: classifier.weight \(head/kernel\)"):
        mpjax.load_pretrained(model, folder)
    mpjax.load_pretrained(model, folder, skip=("head/*",))
    assert float(model.pooler.dense.kernel[0, 0]) == 2.0
    assert float(model.pooler.norm.scale[0]) == 3.0
    save_file(rows | {"head.dense.bias": np.ones(64, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match="unexpected: head.dense.bias"):
        mpjax.load_pretrained(model, folder, skip=("head/*",))


def test_the_norm_that_the_first_layer_does_not_have_is_refused(folder):
    rows = load_file(folder / "model.safetensors")
    save_file(rows | {"layers.0.attn_norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match="unexpected: layers.0.attn_norm.weight"):
        load_encoder(folder)


def test_files_of_sentence_transformers_say_how_a_text_becomes_a_vector(folder, tmp_path):
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    model = load_encoder(folder)
    model.eval()
    assert (model.settings.sentence, model.settings.length) == (Sentence(pooling="cls", normalized=False), 12)
    np.testing.assert_allclose(nnx.jit(lambda model: model(TOKENS))(model), features(model, TOKENS)[:, 0], atol=1e-6)
    export_encoder(model, tmp_path / "out", source=folder)
    assert read_settings(tmp_path / "out") == model.settings
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("rate", "told"), [(0.1, True), (0.0, False)])
def test_dropout_of_attention_is_told_to_be_of_outputs(folder, rate, told):
    (folder / "config.json").write_text(json.dumps(TINY | {"attention_dropout": rate}))
    says = "attention_dropout 0.1 is of the outputs of attention; its weights have no dropout"
    assert models.advice_on(Model(name=f"hf:{folder}")) == [says] * told


@pytest.mark.slow
def test_a_diagnosis_names_a_layer_that_overflows():
    def loss(model, tokens):
        return jnp.mean(jnp.square(model.features(tokens).astype(jnp.float32)))

    model = ModernBERT(settings_of(TINY), rngs=nnx.Rngs(0))
    assert diagnose(model, loss, TOKENS, policy="mixed_float16").verdict == "healthy"
    model.blocks[1].mlp.down.kernel[...] = 1e9 * model.blocks[1].mlp.down.kernel[...]
    found = diagnose(model, loss, TOKENS, policy="mixed_float16", search=False)
    assert (found.verdict, found.path) == ("overflow", "blocks/1/mlp/down")
