import ml_dtypes
import numpy as np
import pytest

from mpjax.data import Image, Label, MappedExamples, Source, conform, labelled_images, require_examples
from mpjax.errors import UsageError


IMAGE = np.full((2, 3, 1), 200, np.uint8)


def test_uint8_images_are_untouched():
    assert conform({"image": IMAGE, "label": 1}, labelled_images(10, (2, 3, 1)))["image"] is IMAGE


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_floating_images_become_float32(dtype):
    settled = conform({"image": np.full((2, 3, 1), 0.5, dtype), "label": 1}, labelled_images(10, (2, 3, 1)))["image"]
    assert settled.dtype == np.float32
    assert settled[0, 0, 0] == 0.5


def test_float64_is_rounded_once():
    # Through bfloat16 or float16 this would be 1.0.
    image = np.full((1, 1, 1), 1.0001, np.float64)
    settled = conform({"image": image, "label": 0}, labelled_images(1, (1, 1, 1)))
    assert settled["image"][0, 0, 0] == np.float32(1.0001)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16])
def test_label_2049_stays_2049(dtype):
    label = conform({"image": IMAGE, "label": np.asarray(2049, dtype)}, labelled_images(3000, (2, 3, 1)))["label"]
    assert (label.dtype, int(label)) == (np.int32, 2049)


def test_batches_nested_ones_too():
    batch = {"image": np.zeros((4, 5, 2, 3, 1)), "label": np.zeros((4, 5), np.int64)}
    settled = conform(batch, labelled_images(10, (2, 3, 1)))
    assert settled["image"].shape == (4, 5, 2, 3, 1)
    assert (settled["label"].shape, settled["label"].dtype) == ((4, 5), np.int32)


def test_lists_have_no_dtype_but_their_values():
    settled = conform({"image": [[[0.5]]], "label": [[1, 2]]}, {"image": Image((1, 1, 1))})
    assert (settled["image"].dtype, settled["image"].tolist()) == (np.float32, [[[0.5]]])
    with pytest.raises(UsageError, match="image: dtype int64; wanted uint8 in 0..255"):
        conform({"image": [[[200]]]}, {"image": Image((1, 1, 1))})


def test_what_is_no_field_is_left_out():
    assert set(conform({"image": IMAGE, "key": object()}, {"image": Image((2, 3, 1))})) == {"image"}


def test_a_column_of_another_name_is_named():
    fields = {"image": Image((2, 3, 1)), "label": Label(10, origin="column 'fine_label'")}
    for label in (np.float16(1), "cat", [1, 2], [[1], [1, 2]]):
        with pytest.raises(UsageError, match=r"^label \(column 'fine_label'\): "):
            conform({"image": IMAGE, "label": label}, fields)


def with_pixel(value):
    image = np.zeros((2, 3, 1))
    image[1, 2, 0] = value
    return image


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"image": IMAGE, "label": 3.0}, r"label: dtype float64; wanted integer class numbers in \[0, 10\)"),
        ({"image": IMAGE[None], "label": np.ones(1, np.float32)}, "label: dtype float32"),
        ({"image": IMAGE, "label": True}, "label: dtype bool"),
        ({"image": IMAGE, "label": 10}, r"label: 10 is outside \[0, 10\)"),
        ({"image": IMAGE, "label": -1}, r"label: -1 is outside \[0, 10\)"),
        ({"image": IMAGE, "label": [1, 2]}, r"label: shape \(2,\) does not match image shape \(2, 3, 1\)"),
        ({"image": with_pixel(np.nan), "label": 1}, r"image: 1 of 6 values .* the first at \(1, 2, 0\): nan"),
        ({"image": with_pixel(-np.inf), "label": 1}, r"image: 1 of 6 values .* the first at \(1, 2, 0\): -inf"),
        ({"image": with_pixel(1e39), "label": 1}, "image: 1 of 6 values are not finite in float32"),
        ({"image": IMAGE.astype(np.int32), "label": 1}, "image: dtype int32; wanted uint8"),
        ({"image": IMAGE[..., 0], "label": 1}, r"image: shape \(2, 3\); wanted \[2, 3, 1\] per example"),
        ({"image": IMAGE.transpose(1, 0, 2), "label": 1}, r"image: shape \(3, 2, 1\); wanted \[2, 3, 1\]"),
        ({"image": IMAGE}, "label: missing; the example has image"),
    ],
)
def test_refusals_name_the_field(example, says):
    with pytest.raises(UsageError, match=says):
        conform(example, labelled_images(10, (2, 3, 1)))


def test_an_empty_split_is_refused():
    with pytest.raises(UsageError, match="split 'train' is empty"):
        require_examples("train", 0)


class Numbers(list):
    """Examples with these labels."""

    def __getitem__(self, index):
        return {"label": super().__getitem__(index)}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_mapped_examples_are_as_many_and_each_is_changed_however_it_is_read():
    examples = MappedExamples(Numbers([3, 5, 7]), lambda example: {"half": example["label"] / 2})
    assert len(examples) == 3
    assert examples[1] == {"half": 2.5}
    assert examples.__getitems__([2, 0]) == [{"half": 3.5}, {"half": 1.5}]


def test_a_source_reads_several_examples_of_a_list():
    source = Source("mine", labelled_images(3, (2, 3, 1)), [{"image": IMAGE, "label": n} for n in range(3)], [])
    assert [example["label"] for example in source.train.__getitems__([2, 0])] == [2, 0]
    assert len(source.train) == 3
    assert source.train[1]["label"] == 1
