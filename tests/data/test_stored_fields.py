"""The fields of a data set survive a checkpoint, so that a model predicts on a machine without the data."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import (
    Image,
    Label,
    Labels,
    Length,
    Mask,
    Numbers,
    NumericTarget,
    Row,
    Source,
    Tokens,
    described_fields,
    open_source,
    source_without_examples,
)
from mpjax.data.audio import Sound
from mpjax.data.images import SIXTEEN


FIELDS = {
    "image": Image((None, 4, 3), depth=SIXTEEN, origin="column 'img'"),
    "label": Label(np.int64(3), names=("a", "b", "é"), ignores=True),
    "mask": Mask((4, 4), 2, True, values=(0, -7)),
    "tokens": Tokens(16, 259, document_end=1),
    "length": Length(15),
    "box": Numbers((2, 3), np.dtype(bool)),
    "row": Row(("x", "y = 1")),
    "target": NumericTarget(("price",), (0.1,), (1 / 3,)),
    "labels": Labels(("red", "big")),
    "sound": Sound(3000, 80),
    "unit": open_source(Data(name="synthetic:4x4x1:3"), pathlib.Path(), "diffusion").fields["image"],
}


def test_every_field_of_mpjax_is_among_them():
    fields, (column,) = [], Image.__bases__
    classes = [column]
    while classes:
        found = [kind for kind in classes.pop().__subclasses__() if kind.__module__.startswith("mpjax.")]
        fields, classes = [*fields, *found], [*classes, *found]
    assert {*fields} == {type(field) for field in FIELDS.values()}


def stored(source):
    described = json.loads(json.dumps(described_fields(source, Data())))
    return source_without_examples("set", described, None)


@pytest.mark.parametrize("name", FIELDS)
def test_every_attribute_of_a_field_comes_back(name):
    field = stored(Source("set", {name: FIELDS[name]}, [], [])).fields[name]
    assert type(field) is type(FIELDS[name])
    assert dataclasses.astuple(field) == dataclasses.astuple(FIELDS[name])


@pytest.mark.parametrize(
    ("pixels", "dtypes"),
    [(np.zeros((2, 2, 1), np.uint8), {"image": np.uint8}), (np.full((2, 2, 1), 7.0), {"image": np.float32})],
)
def test_the_dtype_of_images_comes_back_unless_it_is_that_of_scaled_ones(pixels, dtypes):
    source = Source("set", {"image": Image((2, 2, 1))}, [{"image": pixels}], [])
    assert stored(source).trained_dtypes == dtypes
    scaled = Source("set", {"image": Image((2, 2, 1))}, [{"image": np.ones((2, 2, 1), np.float32)}], [])
    assert stored(scaled).trained_dtypes == {}


class Own(Numbers):
    """A field of the user's."""


@pytest.mark.parametrize(
    "described", [None, {"x": {"kind": "Later", "shape": [2]}}, {"x": {"kind": "Label"}}, {"x": 3}]
)
def test_what_is_not_known_is_no_set(described):
    if described is None:
        described = described_fields(Source("set", {"x": Own((2,), np.dtype(bool))}, [], []), Data())
    assert source_without_examples("set", described, None) is None
