import collections

import numpy as np
import pytest
from PIL import Image

from mpjax.config import Data
from mpjax.data import eval_batches, given_split, open_source, train_batches
from mpjax.data.sources import open_folder
from mpjax.errors import UsageError


def save(path, size=(5, 4), mode="RGB", value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value,) * 3).save(path)


@pytest.fixture
def pets(tmp_path):
    """train: 6 cats of grey value 10, 2 dogs of 20; test: a dog."""
    for index in range(6):
        save(tmp_path / f"train/cat/{index}.png", value=10)
    for index in range(2):
        save(tmp_path / f"train/dog/{index}.PNG", value=20)
    save(tmp_path / "test/dog/0.png", value=20)
    return tmp_path


@pytest.fixture
def scans(tmp_path):
    """Image i is filled with i, its mask with i % 3."""
    for split, count in (("train", 5), ("test", 2)):
        for index in range(count):
            save(tmp_path / split / f"images/{index}.bmp", value=index)
            save(tmp_path / split / f"masks/{index}.png", mode="L", value=index % 3)
    return tmp_path


def opened(folder, task="classification", **settings):
    return open_source(Data(name=f"folder:{folder}", **settings), folder / "nowhere", task)


def test_classes_are_the_sorted_names_of_their_folders(pets):
    source = opened(pets)
    assert source.fields["label"].num_classes == 2
    assert source.fields["label"].names == ("cat", "dog")
    assert opened(pets, num_classes=3).fields["label"].names == ("cat", "dog", "2")
    assert (len(source.train), len(source.test)) == (8, 1)
    config = Data(batch_size=8, eval_batch_size=1, workers=0)
    batch = next(train_batches(source, config, 0).from_position(0))
    assert (batch["image"].dtype, batch["image"].shape) == (np.uint8, (8, 4, 5, 3))
    assert (batch["image"][:, 0, 0, 0] == 10 * (1 + batch["label"])).all()
    assert [batch["label"].tolist() for batch in eval_batches(source, config)] == [[1]]


def test_images_of_floats_may_be_pfm(tmp_path):
    for place in ("train/a", "train/b", "test/a"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(np.full((4, 5), 0.25, np.float32)).save(tmp_path / place / "0.pfm")
    (batch,) = eval_batches(opened(tmp_path), Data(batch_size=1, eval_batch_size=1, workers=0))
    assert (batch["image"] == np.full((1, 4, 5, 1), 0.25, np.float32)).all()


def test_images_stay_encoded(pets):
    assert opened(pets).train[0]["image"].startswith(b"\x89PNG")


def test_sizes_of_a_sample_say_whether_they_vary(pets):
    assert not opened(pets).varies
    save(pets / "test/dog/1.png", size=(6, 4))
    assert opened(pets).fields["image"].shape == (None, None, 3)


def test_a_folder_without_splits_is_one_that_parts_are_taken_of(pets):
    with pytest.raises(UsageError, match=r"has only the split train \(8 examples\), not 'test'; .*") as refused:
        opened(pets / "train")
    assert str(refused.value).endswith("write --data.train_split 'train[:90%]' --data.test_split 'train[90%:]'")
    source = opened(pets / "train", train_split="train[:75%]", test_split="train[75%:]")
    assert (len(source.train), len(source.test)) == (6, 2)


def test_parts_have_something_of_every_class(tmp_path):
    for name in "ab":
        for index in range(20):
            save(tmp_path / name / f"{index}.png")
    source = opened(tmp_path, train_split="train[:50%]", test_split="train[50%:]")
    labels = collections.Counter(int(example["label"]) for example in source.train)
    assert sorted(labels) == [0, 1]
    assert min(labels.values()) >= 5
    again = opened(tmp_path, train_split="train[:50%]", test_split="train[50%:]")
    assert [e["image"].path for e in source.train] == [e["image"].path for e in again.train]
    assert not {e["image"].path for e in source.train} & {e["image"].path for e in source.test}


def test_a_class_may_be_called_train(tmp_path):
    save(tmp_path / "bus/0.png")
    save(tmp_path / "train/0.png")
    assert opened(tmp_path, test_split="train[:1]").fields["label"].num_classes == 2


def test_masks_belong_to_images_of_their_name(scans):
    source = opened(scans, "segmentation", num_classes=3)
    assert set(source.fields) == {"image", "mask"}
    batches = eval_batches(source, Data(eval_batch_size=2))
    (batch,) = list(batches)
    assert (batch["mask"].shape, batch["mask"].dtype) == ((2, 4, 5), np.int32)
    assert (batch["mask"][:, 0, 0] == batch["image"][:, 0, 0, 0] % 3).all()


def test_the_palette_of_a_mask_does_not_matter(scans):
    for path in scans.rglob("masks/*.png"):
        picture = Image.open(path)
        picture.putpalette([255 - index % 256 for index in range(768)])
        picture.save(path)
    (batch,) = eval_batches(opened(scans, "segmentation", num_classes=3), Data(eval_batch_size=2))
    assert sorted(set(batch["mask"].ravel().tolist())) == [0, 1]


def refused(says, folder, task="classification", **settings):
    with pytest.raises(UsageError, match=says):
        opened(folder, task, **settings)


def test_no_folder(tmp_path):
    refused("no folder .*nowhere; wanted one with a folder for each class", tmp_path / "nowhere")


def test_no_folder_of_the_split(pets):
    refused("has no split 'val': there is no folder .*val; there are test, train; write", pets, test_split="val")


def test_no_classes(tmp_path):
    refused("has no folders; wanted one for each class", tmp_path)


def test_an_empty_class(pets):
    (pets / "train/eel").mkdir()
    refused("class 'eel' has no images: .*eel holds nothing", pets)


def test_a_split_that_is_not_named_is_not_taken_for_a_class(pets):
    (pets / "train").rename(pets / "Train")
    (pets / "test").rename(pets / "Test")
    refused(r"class 'Test' has no images: .* holds only folders \(dog\); .*--data.train_split Test", pets)


def test_a_class_that_training_does_not_have(pets):
    save(pets / "test/eel/0.png")
    refused("split 'test' has the class 'eel', but 'train' does not: it has cat, dog", pets)


def test_a_file_that_is_no_image_by_its_ending(pets):
    (pets / "train/cat/notes.txt").write_text("x")
    refused("notes.txt: not an image by its extension", pets)


def test_litter_of_file_managers_is_passed_over(pets):
    for name in (".DS_Store", "Thumbs.db"):
        (pets / "train/cat" / name).write_text("x")
    assert len(opened(pets).train) == 8


def test_a_file_that_is_no_image_by_its_content(pets):
    (pets / "train/cat/3.png").write_text("x")
    refused("train/cat/3.png: cannot be decoded", pets)


def test_a_broken_file_is_named_when_it_is_read(pets):
    path = pets / "train/cat/3.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UsageError, match=r"train/cat/3.png: cannot be decoded: .*; repair or remove the file"):
        train_batches(opened(pets), Data(batch_size=2), 0)


@pytest.mark.parametrize("task", ["classification", "own"])
def test_images_and_masks_are_no_two_classes(scans, task):
    refused("has images and their masks; wanted a folder for each class; for masks write --task segm", scans, task)


def test_a_mask_without_image_and_an_image_without_mask(scans):
    (scans / "train/images/2.bmp").unlink()
    refused("masks/2.png: mask without image: wanted .*train/images/2.png", scans, "segmentation", num_classes=3)
    (scans / "train/masks/2.png").unlink()
    (scans / "train/masks/4.png").unlink()
    refused("images/4.bmp: image without mask: wanted .*train/masks/4.png", scans, "segmentation", num_classes=3)


def test_two_files_of_one_name(scans):
    save(scans / "test/images/0.png")
    refused("wanted one file of that name", scans, "segmentation", num_classes=3)


def test_no_masks(pets):
    refused("no folder .*train/images; segmentation needs PATH/SPLIT/images", pets, "segmentation", num_classes=3)


def test_how_many_classes_masks_have_must_be_said(scans):
    refused("in 5 of 5 masks of 'folder:.*' are 0, 1, 2; write --data.num_classes 3$", scans, "segmentation")


def test_masks_may_have_an_ending_besides_the_name_of_their_image(scans):
    for mask in scans.glob("*/masks/*.png"):
        mask.rename(mask.with_stem(f"{mask.stem}_mask"))
    source = opened(scans, "segmentation", num_classes=3)
    assert sorted(int(example["mask"][0, 0, 0]) for example in source.train) == [0, 0, 1, 1, 2]
    (scans / "train/masks/2_mask.png").rename(scans / "train/masks/2_seg.png")
    refused("image without mask", scans, "segmentation", num_classes=3)


def test_it_has_no_text(pets):
    refused("holds images, but language_modeling needs text", pets, "language_modeling")


def test_only_what_is_wanted_is_read(pets):
    (train, _) = open_folder(str(pets), "classification", Data()).open(["label"])
    for path in pets.rglob("*.png"):
        path.unlink()
    assert set(train[0]) == {"label"}


def test_examples_of_a_split_are_called_by_their_files(pets):
    source = opened(pets, "classification", test_split="train")
    assert sorted(source.places) == sorted(str(path) for path in pets.glob("train/*/*"))
    read = given_split(source, Data(test_split="train"))
    shades = {name: int(read.to_arrays(read.load([at])[0])["image"].max()) for at, name in enumerate(read.names)}
    assert shades == {name: 20 if "dog" in name else 10 for name in source.places}


def test_images_whose_masks_would_be_one_file_are_called_by_their_numbers(scans):
    alone, both = (opened(scans, "segmentation", num_classes=3, test_split=split) for split in ("train", "train+test"))
    assert given_split(alone, Data(test_split="train")).names[0].endswith(".bmp")
    assert given_split(both, Data(test_split="train+test")).names[0] == "train+test[0]"  # two images are called 0
