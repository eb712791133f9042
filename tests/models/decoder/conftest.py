"""Small decoders: one as Llama's, one with all that Gemma 3 adds."""

import dataclasses

import pytest

from mpjax.models import LayerKind, Rope
from mpjax.models.decoder import DecoderSettings


@pytest.fixture(scope="session")
def llama():
    return DecoderSettings(
        vocabulary=20,
        length=16,
        width=16,
        heads=4,
        key_heads=2,
        head_features=4,
        hidden=24,
        layers=(LayerKind(),) * 2,
    )


@pytest.fixture(scope="session")
def gemma(llama):
    local = LayerKind(window=3)
    return dataclasses.replace(
        llama,
        layers=(local, LayerKind(rope=Rope(theta=100.0)), local),
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
