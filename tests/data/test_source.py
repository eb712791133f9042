import pytest

from mpjax.config import Data
from mpjax.data import Image, Label, Mask, labelled_images, open_source
from mpjax.errors import UsageError


def test_digits_are_written_on_first_use(tmp_path):
    assert len(open_source(Data(), tmp_path).train) == 1437
    assert (tmp_path / "digits/1.0.0/dataset_info.json").exists()


def test_digits_obey_the_splits(tmp_path):
    source = open_source(Data(train_split="train[:100]", test_split="train[100:]"), tmp_path)
    assert (len(source.train), len(source.test)) == (100, 1337)


def test_other_names_are_prepared_sets(tiny_sets):
    assert open_source(Data(name="tiny_tensor"), tiny_sets).fields["label"] == Label(3)


def test_synthetic_has_two_batches(tmp_path):
    source = open_source(Data(name="synthetic:4x6x3:5", batch_size=8), tmp_path)
    assert (len(source.train), source.fields) == (16, labelled_images(5, (4, 6, 3)))


@pytest.mark.parametrize("task", ["segmentation", "text_classification", "language_modeling"])
def test_synthetic_serves_one_task(tmp_path, task):
    with pytest.raises(UsageError, match=f"supports classification and diffusion, not {task}"):
        open_source(Data(name="synthetic:4x6x3:5"), tmp_path, task)


@pytest.mark.slow
def test_digits_on_a_canvas_are_written_on_first_use(tmp_path):
    source = open_source(Data(name="digits_canvas"), tmp_path, "segmentation")
    assert source.fields == {"image": Image((32, 32, 1)), "mask": Mask((32, 32), 11)}


@pytest.mark.parametrize("name", ["synthetic", "synthetic:8x8:3", "synthetic:8x8x1:0"])
def test_synthetic_misspelt(tmp_path, name):
    with pytest.raises(UsageError, match=f"got '{name}'; wanted synthetic:HEIGHTxWIDTHxCHANNELS:CLASSES"):
        open_source(Data(name=name), tmp_path)
