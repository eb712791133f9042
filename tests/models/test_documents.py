"""Documents in one row that do not see each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import GPT2, Apart, LayerKind, Rope, apply_remat, keep_apart, require_apart
from mpjax.models.decoder import Decoder, DecoderSettings
from mpjax.models.generation import generate, through_cache
from mpjax.precision import apply_policy
from mpjax.precision.casting import autocast


END = 1
ROW = [7, 9, END, 5, 4, 5, END, END, 8, 3, 2, 6]
"""The rest of a document, one of four tokens, one without any, and one of five."""
DOCUMENTS = {0: [7, 9], 2: [END, 5, 4, 5], 6: [END], 7: [END, 8, 3, 2, 6]}
TOKENS = jnp.asarray([ROW, ROW[::-1]], jnp.int32)

LLAMA = DecoderSettings(
    vocabulary=11, length=12, width=16, heads=4, key_heads=2, head_features=4, hidden=24, layers=(LayerKind(),) * 2
)
WINDOWS = dataclasses.replace(LLAMA, layers=(LayerKind(window=2), LayerKind(rope=Rope(theta=100.0)), LayerKind()))
MODELS = {
    "gpt2": functools.partial(GPT2, vocabulary=11, length=12, width=16, depth=2, heads=2, dropout=0.0),
    "llama": functools.partial(Decoder, LLAMA),
    "windows": functools.partial(Decoder, WINDOWS),
}


def model_of(name, policy="float32", remat="none", **settings):
    model = MODELS[name](rngs=nnx.Rngs(0), **settings)
    if name == "gpt2":  # the initial embeddings hardly tell positions apart
        model.positions[...] = 30 * model.positions[...]
    keep_apart(model, END, name=name)
    apply_policy(model, policy)
    apply_remat(model, remat)
    return model


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def moved(before, after):
    return np.flatnonzero(np.any(np.asarray(before) != np.asarray(after), axis=-1)).tolist()


FORMS = {
    "as it is": {},
    "one loop": {"scan_blocks": True},
    "rematerialised": {"remat": "full"},
    "one loop, rematerialised": {"scan_blocks": True, "remat": "dots"},
}


@pytest.mark.parametrize("form", ["as it is", *(pytest.param(form, marks=pytest.mark.slow) for form in [*FORMS][1:])])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_changes_no_logit_of_another_document_bit_for_bit(name, form):
    model = model_of(name, **FORMS[form])
    before = logits(model, TOKENS)[0]
    for place, seen in ((0, [0, 1]), (4, [4, 5]), (9, [9, 10, 11])):
        assert moved(before, logits(model, TOKENS.at[0, place].add(2))[0]) == seen


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "O1"])
@pytest.mark.parametrize("name", MODELS)
def test_nor_does_it_in_half_precision(name, policy):
    """Rounding hides small changes, so that not all tokens of its own document need to move."""
    model = model_of(name, "float32" if policy == "O1" else policy)
    call = nnx.jit(autocast(lambda model, tokens: model(tokens), policy)) if policy == "O1" else logits
    before = call(model, TOKENS)[0]
    for place, seen in ((0, {0, 1}), (4, {4, 5}), (9, {9, 10, 11})):
        assert {place} <= set(moved(before, call(model, TOKENS.at[0, place].add(2))[0])) <= seen


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "windows"])
def test_each_document_is_as_if_it_were_alone(name):
    model = model_of(name)
    row = logits(model, TOKENS[:1])[0]
    # One program for all: what stands behind a document changes nothing.
    alone = logits(model, jnp.asarray([document + [0] * (12 - len(document)) for document in DOCUMENTS.values()]))
    for (start, document), apart in zip(DOCUMENTS.items(), alone, strict=True):
        np.testing.assert_allclose(row[start : start + len(document)], apart[: len(document)], atol=1e-5)
    model.documents = None
    assert not np.allclose(row[4], logits(model, TOKENS[:1])[0, 4], atol=1e-3)


@pytest.mark.slow
def test_a_text_goes_on_from_its_last_document_and_ends_with_it():
    model = model_of("gpt2")
    whole, cut = generate(model, [ROW[:11], ROW[7:11]], max_tokens=1, numbers=[0, 0])
    np.testing.assert_array_equal(whole.tokens, cut.tokens)
    np.testing.assert_allclose(whole.log_probs, cut.log_probs, atol=1e-6)
    expected = jax.nn.log_softmax(logits(model, TOKENS[:1])[0, 10])
    np.testing.assert_allclose(whole.log_probs[0], expected[whole.tokens[0]], atol=1e-5)
    model.tokens.embedding[...] = model.tokens.embedding[...].at[END].set(100 * model.tokens.embedding[END])
    (ended,) = generate(model, [[END]], max_tokens=4)
    assert (ended.tokens.tolist(), ended.stopped) == ([END], "end")


def test_logits_through_the_cache_are_of_one_document():
    with pytest.raises(UsageError, match="end-of-text token 1 behind its first token"):
        through_cache(model_of("gpt2"), TOKENS)


class Own(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 4, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.reads:
            x = x + self.documents.positions(tokens)[..., None].astype(x.dtype) if self.documents else x
        return self.embed.attend(x)


class Deaf(Own):
    documents = None
    reads = False


class Listening(Own):
    documents = None
    reads = True


class Taken(Own):
    documents = "a table of them"


def test_a_model_that_cannot_keep_documents_apart_is_an_error():
    for make, reason in ((Own, "it has no `documents`"), (Taken, "its attribute `documents` is not None")):
        with pytest.raises(UsageError, match=f"--model.name own.py:Own cannot keep documents apart: {reason}"):
            keep_apart(make(nnx.Rngs(0)), END, name="own.py:Own")


def test_a_model_that_does_not_read_what_keeps_documents_apart_is_an_error():
    shape = jax.ShapeDtypeStruct((2, 6), jnp.int32)
    deaf, listening = Deaf(nnx.Rngs(0)), Listening(nnx.Rngs(0))
    for model in (deaf, listening):
        keep_apart(model, END, name="own.py:Own")
    with pytest.raises(UsageError, match="--model.name own.py:Own .* computes the same without it"):
        require_apart(deaf, shape, name="own.py:Own")
    require_apart(listening, shape, name="own.py:Own")
    assert listening.documents == Apart(END)
