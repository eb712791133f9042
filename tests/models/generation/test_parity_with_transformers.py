"""The tokens that transformers writes with the same weights, from the command line too."""

import json

import numpy as np
import pytest

from mpjax.commands import predict_run
from mpjax.config import Prediction
from mpjax.errors import UsageError
from mpjax.models.decoder import load_decoder
from mpjax.models.generation import generate


torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[hf]'")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # some in PyTorch's own code
]

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama 3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": 3}),
    "qwen 2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen 3": ("Qwen3Config", {"attention_bias": True}),
    "gemma 2": ("Gemma2Config", {"sliding_window": 3, "attn_logit_softcapping": 2.0}),
    "gemma 3": ("Gemma3TextConfig", {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}),
    "smollm 3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
}
PROMPTS = [[1, 20, 30], [1, 7, 8, 9, 10, 11, 12], [1]]


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    kind, settings = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **settings})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for value in theirs.parameters():
        torch.nn.init.normal_(value, 1.0 if value.ndim == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    _save_tokenizer(folder)
    return theirs, folder


def _save_tokenizer(folder):
    """Letters are tokens 3 to 28, and the rest of the model's tokens have no text."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(97 + place): 3 + place for place in range(26)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))


def theirs_behind(model, prompt, count):
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    with torch.no_grad():
        written = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
    return written[0, len(prompt) :].tolist()


def test_the_most_probable_tokens_are_those_of_transformers(saved):
    theirs, folder = saved
    texts = generate(load_decoder(folder), PROMPTS, max_tokens=16, end=[2])
    assert [text.tokens.tolist() for text in texts] == [theirs_behind(theirs, prompt, 16) for prompt in PROMPTS]


def test_a_folder_without_a_run_writes_what_transformers_does(saved, capsys):
    theirs, folder = saved
    settings = {"run": f"hf:{folder}", "prompt": ("abc",), "json": True, "max_tokens": 16}
    predict_run(Prediction(**settings))
    record = json.loads(capsys.readouterr().out)
    expected = theirs_behind(theirs, [1, 3, 4, 5], 16)
    assert record["tokens"] == len(expected)
    text = "".join(chr(94 + token) if 3 <= token < 29 else "\ufffd" if token >= 29 else "" for token in expected)
    assert record["text"] == text
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, expected[1]]}))
    predict_run(Prediction(**settings))
    record = json.loads(capsys.readouterr().out)
    first = expected.index(expected[1])
    assert (record["tokens"], record["stopped"]) == (first + 1, "end")
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UsageError, match='eos_token_id is ."</s>".: wanted one token or a list of them'):
        predict_run(Prediction(**settings))
    (folder / "generation_config.json").unlink()


def test_a_chat_without_a_run_is_what_transformers_makes_of_the_template(chat_tokenizer, capsys):
    torch.manual_seed(0)
    settings = SIZES | {"vocab_size": 260, "max_position_embeddings": 128, "eos_token_id": 256}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    model.save_pretrained(chat_tokenizer)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    prompts = {"hi": [{"role": "user", "content": "hi"}], json.dumps(turns): turns}
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(chat_tokenizer)
    predict_run(Prediction(run=f"hf:{chat_tokenizer}", prompt=tuple(prompts), json=True, max_tokens=8, chat=True))
    for line, messages in zip(capsys.readouterr().out.splitlines(), prompts.values(), strict=True):
        prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        expected = theirs_behind(model, prompt, 8)
        assert json.loads(line)["text"] == theirs.decode(expected, skip_special_tokens=True)


def test_drawn_tokens_are_as_frequent_as_those_of_transformers_with_the_same_settings():
    """Of the first token behind a prompt, by the warpers of transformers."""
    import jax

    from mpjax.models.generation import Sampling, sampled

    logits = np.random.default_rng(0).normal(0, 2, 30).astype(np.float32)
    scores = torch.tensor(logits)[None]
    process = transformers.generation.logits_process
    for warper in (process.TemperatureLogitsWarper(0.7), process.TopKLogitsWarper(12), process.TopPLogitsWarper(0.9)):
        scores = warper(None, scores)
    keys = jax.random.split(jax.random.key(0), 4000)
    settings = Sampling(temperature=0.7, top_k=12, top_p=0.9)
    tokens = sampled(settings, jax.numpy.broadcast_to(logits, (4000, 30)), keys)
    frequencies = np.bincount(tokens, minlength=30) / 4000
    expected = torch.softmax(scores, -1)[0].numpy()
    assert np.array_equal(frequencies > 0, expected > 0)
    np.testing.assert_allclose(frequencies, expected, atol=0.03)
