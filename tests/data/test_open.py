import itertools
import pathlib

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import Image, Label, Length, Mask, Tokens, eval_batches, open_source, train_batches
from mpjax.errors import DataWarning, UsageError


TRIMAP = pathlib.Path(__file__).parents[2] / "configs/oxford_pets.py"
PETS = {"name": "tiny_pets", "num_classes": 3, "preprocess": f"{TRIMAP}:trimap"}


def opened(folder, task, **settings):
    config = Data(**settings)
    return open_source(config, folder, task), config


@pytest.fixture
def own(tmp_path):
    """Writes a function and gives its name."""
    numbers = itertools.count()

    def write(body):
        path = tmp_path / f"own{next(numbers)}.py"
        path.write_text(f"import numpy as np\ndef f(example):\n    {body}\n")
        return f"{path}:f"

    return write


def test_a_text_set_of_tensorflow_datasets(tiny_sets):
    source, config = opened(tiny_sets, "text_classification", name="tiny_sst2", length=16, batch_size=10, workers=0)
    assert source.fields == {"tokens": Tokens(16, 259), "length": Length(16), "label": Label(2)}
    batch = next(train_batches(source, config, 0).from_position(0))
    assert sorted(batch["length"].tolist()) == [2, 6, 10, 14, 16, 16, 16, 16, 16, 16]
    assert (batch["tokens"][:, 0] == 2).all()


def test_its_texts_alone(tiny_sets):
    source, _ = opened(tiny_sets, "language_modeling", name="tiny_sst2", length=8)
    assert (source.fields, len(source.train)) == ({"tokens": Tokens(9, 259)}, (45 * 4 + 10) // 8)


def test_a_segmentation_set_of_tensorflow_datasets_through_a_function(tiny_sets):
    source, config = opened(tiny_sets, "segmentation", **PETS, image_size=12, eval_batch_size=3, batch_size=10)
    assert source.fields == {"image": Image((None, None, 3)), "mask": Mask((None, None), 3)}
    (batch,) = eval_batches(source, config)
    assert (batch["mask"].shape, batch["mask"].dtype) == ((3, 12, 12), np.int32)
    assert sorted(set(batch["mask"].ravel().tolist())) == [0, 1, 2]
    assert batch["image"].dtype == np.uint8
    # The image is as bright as its mask says; the middle of both is the pet.
    assert abs(int(batch["image"][0, 6, 6, 0]) - 80) < 30
    assert batch["mask"][0, 6, 6] == 0
    assert next(train_batches(source, config, 0).from_position(0))["mask"].shape == (10, 12, 12)


def test_without_the_function_its_values_are_its_classes_if_they_are_as_many_and_that_is_told(tiny_sets):
    with pytest.warns(DataWarning, match="mask: the stored values 1, 2, 3 are used as classes 0 to 2"):
        source, config = opened(tiny_sets, "segmentation", name="tiny_pets", num_classes=3, image_size=12)
    (batch, *_) = eval_batches(source, config)
    assert set(batch["mask"].ravel().tolist()) == {0, 1, 2}
    with pytest.raises(UsageError, match=r"the stored values in 10 of 10 masks .* are 1, 2, 3, but the 2 classes"):
        opened(tiny_sets, "segmentation", name="tiny_pets", num_classes=2)


def test_and_how_many_there_are_must_be_said(tiny_sets):
    with pytest.raises(UsageError, match=r"its mask \(column 'segmentation_mask'\) has; .* --data.mask_values 1 2 3,"):
        opened(tiny_sets, "segmentation", name="tiny_pets")


def test_the_same_set_for_classification(tiny_sets):
    assert opened(tiny_sets, "classification", name="tiny_pets")[0].fields["label"] == Label(37)
    named = opened(tiny_sets, "classification", name="tiny_pets", columns={"label": "species"})[0]
    assert named.fields["label"] == Label(2)


def test_a_function_may_change_size_and_dtype(tiny_sets, own):
    function = own("return {'image': example['image'][:8, :8] / 255, 'label': example['label'] % 3}")
    source, config = opened(tiny_sets, "classification", name="tiny_pets", preprocess=function, num_classes=3)
    assert source.fields == {"image": Image((8, 8, 3)), "label": Label(3)}
    batch = next(iter(eval_batches(source, config)))
    assert (batch["image"].dtype, batch["image"].shape[1:]) == (np.float32, (8, 8, 3))
    assert batch["image"].max() <= 1


def test_a_mask_takes_the_size_of_its_image(tiny_sets, own):
    cut = own("return {'image': example['image'][:8, :8], 'mask': example['mask'][:8, :9] - 1}")
    source, _ = opened(tiny_sets, "segmentation", name="tiny_pets", preprocess=cut, num_classes=3)
    with pytest.raises(UsageError, match=r"mask \(column 'segmentation_mask' after .*\(8, 9\); wanted \[8, 8\]"):
        train_batches(source, Data(batch_size=2), 0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return {**example, 'label': np.float32(1)}", r"label \(column 'label' after .*own.*:f\): dtype float32"),
        ("return {**example, 'image': example['image'] * np.nan}", r"image \(.*'image' after .*\): 48 of 48 values"),
        ("return {**example, 'image': example['image'].astype(int)}", r"image \(.*'image' after .*\): dtype int64"),
    ],
)
def test_what_a_function_breaks_is_named(tiny_sets, own, body, says):
    source, config = opened(tiny_sets, "classification", name="tiny_tensor", preprocess=own(body), batch_size=2)
    with pytest.raises(UsageError, match=says):
        train_batches(source, config, 0)


def test_a_function_may_make_texts(tiny_sets, own):
    function = own("return {**example, 'text': example['text'].upper()}")
    source, _ = opened(tiny_sets, "text_classification", name="tiny_sst2", preprocess=function, length=6)
    assert source.train[1]["tokens"].tolist() == [2, *(ord(c) + 3 for c in "GUT "), 1]


@pytest.mark.parametrize(("name", "value"), [("preprocess", "a.py:f"), ("columns", {"image": "a"}), ("num_classes", 3)])
def test_settings_that_a_synthetic_set_would_ignore_are_refused(tmp_path, name, value):
    with pytest.raises(UsageError, match=f"its name sets shapes and classes; leave out --data.{name}"):
        open_source(Data(name="synthetic:8x8x1:10", **{name: value}), tmp_path)
