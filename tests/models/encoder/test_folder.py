"""The files of an encoder's folder are understood or refused, and exported again."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax import models
from mpjax.config import Model
from mpjax.data import Label, Length, Tokens
from mpjax.errors import UsageError
from mpjax.models.encoder import (
    Encoder,
    Sentence,
    export_encoder,
    load_encoder,
    make_classifier,
    normalized,
    pooled,
    read_settings,
    settings_of,
)
from mpjax.models.pretrained import export_safetensors


BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "pad_token_id": 0,
}
MODULES = [
    {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for number, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
]
POOLING = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@pytest.fixture
def write(tmp_path):
    """Writes a folder; a file by name has other content, or is left out if that is None."""

    def write(weights=False, **files):
        names = {"config": "config.json", "modules": "modules.json", "pooling": "1_Pooling/config.json"}
        names |= {"length": "sentence_bert_config.json", "whole": "config_sentence_transformers.json"}
        content = {"config": BERT, "modules": MODULES, "pooling": POOLING, "length": {"max_seq_length": 12}} | files
        folder = tmp_path / "folder"
        (folder / "1_Pooling").mkdir(parents=True)
        for name, value in content.items():
            if value is not None:
                (folder / names[name]).write_text(json.dumps(value))
        if weights:
            model = Encoder(settings_of(content["config"]), rngs=nnx.Rngs(0))
            export_safetensors(model, folder / "model.safetensors", layout="huggingface")
        return folder

    return write


FEATURES = jnp.asarray([[[1.0, -2.0], [3.0, -4.0], [9.0, 9.0]], [[1.0, 2.0], [9.0, 9.0], [9.0, 9.0]]], jnp.bfloat16)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", [[2.0, -3.0], [1.0, 2.0]]),
        ("cls", [[1.0, -2.0], [1.0, 2.0]]),
        ("max", [[3.0, -2.0], [1.0, 2.0]]),
        ("mean_sqrt_len", [[4 / 2**0.5, -6 / 2**0.5], [1.0, 2.0]]),
    ],
)
def test_padding_is_in_no_vector(pooling, expected):
    vectors = pooled(FEATURES, jnp.asarray([2, 1]), pooling)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    assert vectors.dtype == jnp.float32


def test_a_vector_of_zeros_stays_so():
    np.testing.assert_allclose(normalized(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_the_folder_says_how_a_text_becomes_a_vector(write):
    cls = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    settings = read_settings(write(pooling=cls, modules=MODULES[:2]))
    assert (settings.sentence, settings.length, settings.positions) == (
        Sentence(pooling="cls", normalized=False),
        12,
        16,
    )


def test_newer_files_name_the_pooling(write):
    modules = [
        {**module, "type": module["type"].replace("models.", "sentence_transformer.modules.x.")} for module in MODULES
    ]
    settings = read_settings(write(pooling={"embedding_dimension": 16, "pooling_mode": "max"}, modules=modules))
    assert settings.sentence == Sentence(pooling="max")


def test_a_name_of_the_pooling_decides_over_flags(write):
    flags = POOLING | {"pooling_mode": "cls"}
    assert read_settings(write(pooling=flags)).sentence == Sentence(pooling="cls")


NEW = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


@pytest.mark.parametrize(
    ("name", "content", "limit", "length"),
    [
        ("bert", NEW, 9, 9),
        ("bert", NEW, 10**30, 16),
        ("bert", {"max_seq_length": None}, 512, 16),
        ("bert", {"max_seq_length": 12}, 9, 12),
        ("roberta", {"max_seq_length": 12}, 512, 12),
        ("xlm-roberta", {"max_seq_length": 12}, 512, 12),
    ],
)
def test_the_file_of_the_network_says_the_length_or_else_the_tokenizer(write, name, content, limit, length):
    """Files have the name of the network that a folder was first for; the newest leave the length to the tokenizer."""
    folder = write(length=None)
    (folder / f"sentence_{name}_config.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    assert read_settings(folder).length == length


def test_without_modules_it_is_the_normalized_mean(write):
    settings = read_settings(write(modules=None))
    assert (settings.sentence, settings.length) == (Sentence(), 16)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config": BERT | {"rope_theta": 1e4}}, "mpjax does not know rope_theta 10000.0"),
        ({"config": BERT | {"position_embedding_type": "relative_key"}}, 'the encoder of mpjax has "absolute" only'),
        ({"config": BERT | {"is_decoder": True}}, "is_decoder is true"),
        ({"config": BERT | {"hidden_act": "silu"}}, 'hidden_act is "silu": wanted gelu or'),
        ({"config": BERT | {"architectures": ["GPT2Model"]}}, "wanted one class of Bert"),
        ({"config": BERT | {"num_attention_heads": 3}}, "cannot have 3 heads"),
        ({"config": BERT | {"layer_norm_eps": -1e-12}}, "layer_norm_eps is -1e-12: wanted a number of at least 0"),
        ({"config": BERT | {"hidden_dropout_prob": 1.5}}, "is 1.5: wanted a number of at least 0 and below 1"),
        (
            {"modules": [*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}]},
            "Normalize, Dense",
        ),
        ({"modules": [*MODULES[:2], {"path": "2", "type": "mine.Normalize"}]}, "no module of sentence-transformers"),
        ({"modules": [{**MODULES[0], "path": "0_Transformer"}, *MODULES[1:]]}, "move the files of 0_Transformer"),
        ({"pooling": POOLING | {"pooling_mode_max_tokens": True}}, "the pooling is mean_tokens and max_tokens"),
        ({"pooling": {"pooling_mode_lasttoken": True}}, "the pooling is lasttoken: wanted one of cls_token"),
        ({"pooling": POOLING | {"word_embedding_dimension": 8}}, "is of 8 features, and the encoder has 16"),
        ({"length": {"max_seq_length": 12, "do_lower_case": True}}, "do_lower_case is true"),
        ({"length": {"max_seq_length": 99}}, "max_seq_length is 99: the encoder takes at most 16"),
        ({"length": {"unpad_inputs": True}}, "remove it from .*sentence_bert_config.json"),
        ({"length": {"module_output_name": "scores"}}, 'module_output_name is "scores"'),
        ({"pooling": POOLING | {"include_prompt": False}}, "include_prompt is false: mpjax pools all tokens"),
        ({"whole": {"default_prompt_name": "query"}}, 'default_prompt_name is "query"'),
        ({"whole": {"similarity_fn_name": "euclidean"}}, "mpjax compares vectors by cosine"),
    ],
)
def test_what_is_not_understood_is_an_error(write, files, says):
    with pytest.raises(UsageError, match=says):
        read_settings(write(**files))


def test_texts_of_roberta_have_fewer_tokens_than_positions(write):
    config = BERT | {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1}
    settings = read_settings(write(config=config, modules=None))
    assert (settings.length, settings.positions, settings.padding, settings.family) == (14, 16, 1, "roberta")


def test_an_export_has_the_files_of_its_source(write, tmp_path):
    folder = write(weights=True)
    model = load_encoder(folder)
    export_encoder(model, tmp_path / "out", source=folder, dtype="bfloat16")
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == BERT | {"torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "2_Normalize").is_dir()
    (folder / "modules.json").unlink()
    with pytest.raises(UsageError, match="has other settings than the model"):
        export_encoder(model, tmp_path / "again", source=folder)


def test_an_exported_classifier_says_what_it_predicts(write, tmp_path):
    folder = write(weights=True)
    model = make_classifier(read_settings(folder), num_classes=2, rngs=nnx.Rngs(0))
    export_encoder(model, tmp_path / "out", source=folder, classes=("stars", "length"), problem="regression")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "stars", "1": "length"})


def test_streams_of_dropout_differ_and_a_loaded_encoder_trains(write):
    model = load_encoder(write(weights=True), scan_blocks=True)
    model.train()
    tokens = jnp.ones((2, 8), jnp.int32)
    one, two = model(tokens), model(tokens)
    assert not np.allclose(one[0], one[1])
    assert not np.allclose(one, two)


PAIRS = {"tokens": Tokens(8, 260), "length": Length(8), "positive": Tokens(8, 260), "positive_length": Length(8)}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (PAIRS, "Encoder"),
        ({"tokens": Tokens(8, 260), "length": Length(8), "label": Label(3)}, "EncoderClassifier"),
    ],
)
def test_the_data_decides_what_the_encoder_is_for(write, fields, kind):
    name = f"hf:{write()}"

    def built(fields):
        return nnx.eval_shape(lambda: models.build_model(Model(name=name), fields=fields, rngs=nnx.Rngs(0)))

    assert type(built(fields)).__name__ == kind
    with pytest.raises(UsageError, match="at most 12 tokens, and the data has texts of 13: write --data.length 12"):
        built(fields | {"tokens": Tokens(13, 260)})
    with pytest.raises(UsageError, match="has 300 tokens, and the data 400: write --data.tokenizer"):
        built(fields | {"tokens": Tokens(8, 400)})
    with pytest.raises(UsageError, match="is for text_classification: it takes tokens, length, label"):
        built({"tokens": Tokens(9, 260)})


@pytest.mark.parametrize(("rate", "told"), [(0.1, True), (None, True), (0.0, False)])
def test_dropout_of_attention_weights_is_told_to_have_no_effect(write, rate, told):
    config = {key: value for key, value in BERT.items() if key != "attention_probs_dropout_prob"}
    folder = write(config=config if rate is None else {**config, "attention_probs_dropout_prob": rate})
    says = "attention_probs_dropout_prob 0.1 without effect: attention weights have no dropout"
    assert models.advice_on(Model(name=f"hf:{folder}")) == [says] * told
