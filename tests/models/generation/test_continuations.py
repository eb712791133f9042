"""Continuing texts: the cache changes no logit, texts of a batch are those of single ones, and where they end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import GPT2, MLP, LayerKind, Rope, apply_remat
from mpjax.models.decoder import Decoder, DecoderSettings
from mpjax.models.generation import Sampling, generate, padded_length, programs_of, split, through_cache
from mpjax.precision import apply_policy


LOCAL = LayerKind(window=3)
LLAMA = DecoderSettings(
    vocabulary=20,
    length=40,
    width=16,
    heads=4,
    key_heads=2,
    head_features=4,
    hidden=24,
    layers=(LayerKind(), LayerKind(rope=None)),
)
GEMMA = dataclasses.replace(
    LLAMA,
    layers=(LOCAL, LayerKind(rope=Rope(theta=100.0))),
    activation="tanh_gelu",
    norm_offset=1.0,
    norms_after=True,
    norms_of_heads=True,
    embedding_scale=4.0,
    score_scale=0.3,
    score_cap=5.0,
    logit_cap=3.0,
    tied=True,
)
TOKENS = jax.random.randint(jax.random.key(0), (3, 9), 0, 20)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def made(name, *, scan=False):
    sizes = {"scan_blocks": scan, "rngs": nnx.Rngs(0)}
    if name == "gpt2":
        return GPT2(vocabulary=20, length=40, width=16, depth=2, heads=2, **sizes)
    return Decoder({"llama": LLAMA, "gemma": GEMMA}[name], **sizes)


@pytest.fixture(scope="module", params=["llama", "gemma", "gpt2"])
def model(request):
    return made(request.param)


@nnx.jit
def whole(model, tokens):
    return model(tokens)


def in_evaluation(model):
    model = nnx.merge(*nnx.split(model))
    model.eval()
    return model


@pytest.mark.parametrize("prompt", [1, 4])
def test_logits_through_the_cache_are_those_of_the_whole_text(model, prompt):
    expected = whole(in_evaluation(model), TOKENS)
    np.testing.assert_allclose(through_cache(model, TOKENS, prompt=prompt), expected, atol=1e-5)


def test_blocks_of_one_loop_write_what_single_blocks_write():
    single, loop = (generate(made("gemma", scan=scan), PROMPTS, max_tokens=6) for scan in (False, True))
    assert [text.tokens.tolist() for text in single] == [text.tokens.tolist() for text in loop]


def test_rematerialised_blocks_write_what_others_write():
    plain, rematerialised = made("llama"), made("llama")
    apply_remat(rematerialised, "full")
    plain, rematerialised = (generate(model, PROMPTS, max_tokens=6) for model in (plain, rematerialised))
    assert [text.tokens.tolist() for text in plain] == [text.tokens.tolist() for text in rematerialised]


def test_the_most_probable_token_is_that_of_the_whole_text(model):
    texts = generate(model, PROMPTS, max_tokens=6)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        full = jnp.asarray([[*prompt, *text.tokens]], jnp.int32)
        logits = whole(in_evaluation(model), full)[0, len(prompt) - 1 : -1]
        assert np.argmax(logits, axis=-1).tolist() == text.tokens.tolist()
        scores = jax.nn.log_softmax(logits)[np.arange(6), text.tokens]
        np.testing.assert_allclose(text.log_probs, scores, atol=1e-5)
        assert text.stopped == "limit"


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_k=9, top_p=0.9)], ids=["greedy", "drawn"]
)
def test_a_text_of_a_batch_is_the_text_alone(model, sampling):
    together = generate(model, PROMPTS, max_tokens=6, sampling=sampling, seed=3)
    for number, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_tokens=6, sampling=sampling, seed=3, numbers=[number])[0]
        assert alone.tokens.tolist() == together[number].tokens.tolist()


def test_a_seed_gives_one_text_and_other_seeds_and_numbers_give_others():
    model, drawn = made("gpt2"), Sampling(temperature=1.0)
    first, again, other = (
        [text.tokens.tolist() for text in generate(model, [[1], [1]], max_tokens=8, sampling=drawn, seed=seed)]
        for seed in (0, 0, 1)
    )
    assert first == again
    assert len({*map(tuple, first + other)}) == 4


def test_an_end_of_text_token_or_the_caller_ends_a_text_and_the_others_go_on():
    model = made("llama")
    free = [text.tokens.tolist() for text in generate(model, PROMPTS, max_tokens=6)]
    end = free[0][2]
    texts = generate(model, PROMPTS, max_tokens=6, end=[end])
    assert [text.tokens.tolist() for text in texts] == [
        row[: row.index(end) + 1] if end in row else row for row in free
    ]
    assert texts[0].stopped == "end"
    heard = []
    texts = generate(model, PROMPTS, max_tokens=6, watch=lambda row, token: heard.append((row, token)) or row == 1)
    assert [(len(text.tokens), text.stopped) for text in texts] == [(6, "limit"), (1, "stop"), (6, "limit")]
    assert [token for row, token in heard if row == 0] == free[0]


def test_a_text_ends_at_the_length_of_the_model(model):
    texts = generate(model, [[1] * 37, [1]], max_tokens=5)
    assert [(len(text.tokens), text.stopped) for text in texts] == [(3, "length"), (5, "limit")]


def test_keys_are_kept_in_the_dtype_that_attention_computes_in():
    model = made("llama")
    apply_policy(model, "mixed_bfloat16;blocks/1/attention=float32")
    keys = jax.eval_shape(lambda: jax.random.key(0)[None])
    text = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # of the blocks' sums
        parts = split(model)
        programs = programs_of(parts, Sampling())
        _, progress = jax.eval_shape(programs.read(32), parts.arrays, *text, keys)
        drawn, after = jax.eval_shape(programs.step, parts.arrays, progress)
    assert [(slots.keys.dtype, slots.keys.shape) for slots in progress.cache] == [
        (jnp.bfloat16, (1, 32, 2, 4)),
        (jnp.float32, (1, 32, 2, 4)),
    ]
    assert after == progress
    assert drawn.log_probs.dtype == jnp.float32


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_weights_are_cast_to_half_precision_once_and_norms_are_not(policy):
    model = made("llama")
    apply_policy(model, policy)
    half = model.blocks[0].mlp.up.kernel[...].astype(policy.removeprefix("mixed_"))
    parts = split(model)
    sizes = {str(array.dtype): 0 for array in parts.arrays}
    for array in parts.arrays:
        sizes[str(array.dtype)] += array.size
    assert sizes["float32"] == 5 * 16  # the scales of norms
    assert any(array.shape == half.shape and np.array_equal(array, half) for array in parts.arrays)
    assert model.blocks[0].mlp.up.kernel[...].dtype == jnp.float32


def test_prompts_are_padded_to_few_lengths():
    assert {padded_length(length, 1024) for length in range(1, 1025)} == {32, 64, 128, 256, 512, 1024}
    assert padded_length(40, 48) == 48


def test_prompts_of_other_lengths_compile_nothing():
    parts = split(made("gpt2"))
    generate(parts, [[1, 2, 3]], max_tokens=4)
    programs = programs_of(parts, Sampling())
    before = programs.read(32)._cache_size(), programs.step._cache_size()
    generate(parts, [[1] * 20], max_tokens=7)
    assert (programs.read(32)._cache_size(), programs.step._cache_size()) == before


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1] * 40], {}, "prompt 0 has 40 tokens, and the model takes texts of at most 40.*cut it to 39"),
        ([[1, 20]], {}, "prompt 0 has the token 20, and the model knows 0 to 19"),
        ([[-1]], {}, "prompt 0 has the token -1"),
        ([[1.5]], {}, r"prompt 0 is float64\[1\]: wanted a list of whole numbers"),
        ([[[1, 2]]], {}, r"prompt 0 is int64\[1, 2\]: wanted a list of whole numbers"),
        ([[1]], {"max_tokens": 0}, "max_tokens is 0: wanted at least 1"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_an_error(prompts, settings, message):
    with pytest.raises(UsageError, match=message):
        generate(split(made("gpt2")), prompts, **settings)


@pytest.mark.parametrize("huge", [1e38, -1e38])
def test_one_logit_that_overflows_is_an_error(huge):
    model = made("gpt2")
    model.norm.scale[...] *= 0.0
    model.norm.bias[...] = model.norm.bias[...].at[0].set(100.0)
    model.tokens.embedding[...] = model.tokens.embedding[...].at[7, 0].set(huge)
    with pytest.raises(UsageError, match="prompt 0: a logit of token 1 behind it is not finite"):
        generate(model, [[1]], max_tokens=2)


def test_a_logit_that_is_not_finite_is_an_error():
    model = made("gpt2")
    model.norm.scale[...] *= jnp.nan
    with pytest.raises(UsageError, match="prompt 0: a logit of token 1 behind it is not finite"):
        generate(model, [[1]], max_tokens=2)


def test_a_model_without_the_methods_is_an_error():
    with pytest.raises(UsageError, match="MLP cannot continue texts: it has no length and no tokens and no blocks"):
        generate(MLP(4, 4, 1, 2, rngs=nnx.Rngs(0)), [[1]])


@pytest.mark.parametrize("prompt", [0, 10])
def test_a_prompt_of_other_tokens_than_there_are_is_an_error(prompt):
    with pytest.raises(UsageError, match=f"a prompt of {prompt} of 9 tokens: wanted 1 to 9"):
        through_cache(made("gpt2"), TOKENS, prompt=prompt)
