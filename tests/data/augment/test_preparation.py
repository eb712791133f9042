"""What happens to a batch before the model: mpjax's part, then the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.config import Data, PythonObject
from mpjax.data import Image, Label, Tokens
from mpjax.data.augment import preparation_of
from mpjax.errors import UsageError


FIELDS = {"image": Image((2, 2, 1)), "label": Label(3)}
BATCH = {"image": jnp.full((2, 2, 2, 1), 255, jnp.uint8), "label": jnp.array([0, 1])}
KEY = jax.random.key(0)


def prepared(augment, batch=BATCH, key=KEY, fields=FIELDS):
    return preparation_of(Data(crop_padding=0, augment=augment and PythonObject(augment)), fields)(batch, key)


def test_images_are_scaled_before_the_users_function_sees_them():
    seen = []

    def darker(batch, key):
        seen.append(batch["image"].dtype)
        return {**batch, "image": batch["image"] / 2}

    assert np.all(prepared(darker)["image"] == 0.5)
    assert seen == [jnp.float32]


def test_evaluation_is_not_augmented():
    assert np.all(prepared(lambda batch, key: {}, key=None)["image"] == 1)


def test_the_key_differs_from_those_of_the_other_augmentations():
    keys = []
    prepared(lambda batch, key: keys.append(key) or batch)
    others = [*jax.random.split(KEY), *(jax.random.fold_in(KEY, number) for number in range(2, 6))]
    assert not any(jnp.array_equal(jax.random.key_data(keys[0]), jax.random.key_data(other)) for other in others)


def test_tokens_are_augmented_too():
    batch = {"tokens": jnp.arange(4).reshape(2, 2)}
    found = prepared(lambda batch, key: {"tokens": batch["tokens"] + 1}, batch, fields={"tokens": Tokens(2, 9)})
    assert found["tokens"].tolist() == [[1, 2], [3, 4]]
    assert prepared("", batch, fields={"tokens": Tokens(2, 9)}) is batch


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (lambda batch, key: batch["image"], "wanted a dict of the same fields"),
        (lambda batch, key: {"image": batch["image"]}, "returned no label; wanted the same fields"),
        (
            lambda batch, key: {**batch, "image": batch["image"].astype(jnp.float16)},
            "image is float16 .*; wanted float32",
        ),
        (
            lambda batch, key: {**batch, "label": batch["label"][:1]},
            r"label is int32 \(1,\); wanted int32 and 2 examples",
        ),
    ],
)
def test_other_results_are_errors(augment, said):
    with pytest.raises(UsageError, match=said):
        prepared(augment)
