"""A model that does not fit its task is refused before anything is compiled."""

import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.data import Image, Label, Length, Mask, Tokens, labelled_images
from mpjax.errors import UsageError
from mpjax.training import check_fit


IMAGES = labelled_images(10, (4, 4, 3))
PIXELS = {"image": Image((4, 6, 3)), "mask": Mask((4, 6), 5)}
TEXTS = {"tokens": Tokens(9, 50), "length": Length(9), "label": Label(7)}
BLOCKS = {"tokens": Tokens(9, 50)}


class Giving(nnx.Module):
    """Zeros of the input's leading axes and these."""

    def __init__(self, axes, *last):
        self.axes, self.last = axes, last

    def __call__(self, x):
        return jnp.zeros((*x.shape[: self.axes], *self.last))


class OfTexts(Giving):
    def __call__(self, tokens, lengths):
        return super().__call__(tokens)


@pytest.mark.parametrize(
    ("task", "fields", "model"),
    [
        ("classification", IMAGES, Giving(1, 10)),
        ("segmentation", PIXELS, Giving(3, 5)),
        ("text_classification", TEXTS, OfTexts(1, 7)),
        ("language_modeling", BLOCKS, Giving(2, 50)),
    ],
)
def test_a_model_that_fits_passes(task, fields, model):
    check_fit(model, task, fields, name="own.py:Net")


@pytest.mark.parametrize(
    ("task", "fields", "model", "says"),
    [
        (
            "classification",
            IMAGES,
            Giving(1, 17),
            r"own.py:Net gives \(2, 17\) for a batch of 2; wanted logits \(2, 10\)",
        ),
        ("classification", IMAGES, Giving(3, 10), r"gives \(2, 4, 4, 10\).*wanted logits \(2, 10\)"),
        ("segmentation", PIXELS, Giving(1, 5), r"gives \(2, 5\).*wanted logits \(2, 4, 6, 5\)"),
        ("text_classification", TEXTS, Giving(1, 7), "cannot be called for --task text_classification: too many"),
        (
            "language_modeling",
            BLOCKS,
            OfTexts(2, 50),
            "cannot be called for --task language_modeling: missing a required",
        ),
        ("language_modeling", BLOCKS, Giving(2, 49), r"gives \(2, 8, 49\).*wanted logits \(2, 8, 50\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(task, fields, model, says):
    with pytest.raises(UsageError, match=says):
        check_fit(model, task, fields, name="own.py:Net")
