"""Several sets in one run: what has to agree, and what reaches a batch."""

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest
from PIL import Image as Picture

from mpjax.config import Data
from mpjax.data import (
    BatchesInMemory,
    Image,
    Label,
    Portion,
    Share,
    StreamedBatches,
    Tokens,
    eval_batches,
    mixed,
    named,
    open_source,
    train_batches,
)
from mpjax.data.sources import synthetic_source
from mpjax.errors import DataWarning, UsageError


FIRST = synthetic_source(3, (4, 4, 1), 23)
SOURCE = dataclasses.replace(FIRST, mix=(Portion(synthetic_source(3, (4, 4, 1), 6, seed=1), 0.25),))
MEMORY = Data(name="mine", mix={"other": 0.25}, batch_size=20, eval_batch_size=23)
STREAM = dataclasses.replace(MEMORY, in_memory_mb=0)
every_kind = pytest.mark.parametrize("config", [MEMORY, STREAM], ids=["memory", "stream"])


def take(batches, position, count):
    return list(itertools.islice(batches.from_position(position), count))


def numbers(batches):
    """Sets and numbers of examples, by their pixels."""
    known = {
        part.train[index]["image"].tobytes(): (place, index)
        for place, part in enumerate(SOURCE.trained_on)
        for index in range(len(part.train))
    }
    return [known[image.tobytes()] for batch in batches for image in batch["image"]]


@every_kind
def test_each_set_has_its_share_and_no_example_comes_twice_in_an_epoch_of_its_set(config):
    found = numbers(take(train_batches(SOURCE, config, 0), 0, 50))
    first = [number for place, number in found if place == 0]
    other = [number for place, number in found if place == 1]
    assert (len(first), len(other)) == (750, 250)
    for own, size in ((first, 23), (other, 6)):
        passes = [own[start : start + size] for start in range(0, len(own) // size * size, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert passes[0] != passes[1]


def test_batches_from_memory_and_streamed_ones_are_the_same():
    memory, stream = (train_batches(SOURCE, config, 7) for config in (MEMORY, STREAM))
    assert (type(memory), type(stream)) == (BatchesInMemory, StreamedBatches)
    assert memory.steps_per_epoch == stream.steps_per_epoch == 1  # 23 of the first set are 30 of the mixture
    for one, other in zip(take(memory, 3, 9), take(stream, 3, 9), strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["label"], other["label"])
        assert all(value.ctypes.data % 64 == 0 for value in other.values())


@every_kind
def test_a_batch_is_the_same_from_wherever_reading_starts_and_whichever_process_reads_its_rows(config):
    whole = take(train_batches(SOURCE, config, 0), 0, 56)
    halves = [take(train_batches(SOURCE, config, 0, Share(index, 2)), 48, 8) for index in range(2)]
    for position in range(8):
        rows = np.concatenate([half[position]["image"] for half in halves])
        np.testing.assert_array_equal(rows, whole[48 + position]["image"])


@every_kind
def test_images_alternate_between_passes_of_their_own_set(config):
    config = dataclasses.replace(config, flip=True, alternate_flips=True)
    seen = {}
    for batch in take(train_batches(SOURCE, config, 0), 0, 30):
        for example, mirrored in zip(numbers([batch]), batch["mirrored"].tolist(), strict=True):
            seen.setdefault(example, []).append(mirrored)
    assert len(seen) == 29
    assert all(len(sides) >= 15 for sides in seen.values())
    assert all(one != other for sides in seen.values() for one, other in itertools.pairwise(sides))


def test_the_first_set_alone_is_evaluated_on():
    (batch,) = eval_batches(SOURCE, MEMORY)
    np.testing.assert_array_equal(batch["image"], [FIRST.test[index]["image"] for index in range(23)])


def test_an_epoch_smaller_than_a_batch_is_refused():
    wanted = "one pass through split 'train' of 'synthetic', an epoch of the mixture, takes 30 examples, fewer than one"
    with pytest.raises(UsageError, match=wanted):
        train_batches(SOURCE, dataclasses.replace(MEMORY, batch_size=31), 0)


def test_a_bad_example_is_named_by_its_own_set_and_number():
    broken = dataclasses.replace(synthetic_source(5, (4, 4, 1), 5), name="other", fields=FIRST.fields)
    source = dataclasses.replace(FIRST, mix=(Portion(broken, 0.5),))
    with pytest.raises(UsageError, match=r"label: 3 is outside \[0, 3\).* \(example 3 of split 'train' of 'other'\)"):
        train_batches(source, MEMORY, 0)


def other_set(**changed):
    """A set of two examples, like `FIRST` but for what is changed."""
    return dataclasses.replace(synthetic_source(3, (4, 4, 1), 2), name="other", **changed)


def images(shape, classes=3, names=()):
    return {"image": Image(shape), "label": Label(classes, names=names)}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            other_set(fields=images((8, 6, 1))),
            r"'other' of --data.mix: its image is Image\(shape=\(8, 6, 1\)\), that of 'synthetic' is "
            r"Image\(shape=\(4, 4, 1\)\); write --data.image_size 4 to resize the images of all sets",
        ),
        (
            other_set(fields=images((4, 4, 3))),
            r"its image is Image\(shape=\(4, 4, 3\)\), .* wanted the same image in all sets; let --data.preprocess",
        ),
        (
            other_set(fields=images((4, 4, 1), classes=5)),
            r"its label is Label\(num_classes=5\), that of 'synthetic' is Label\(num_classes=3\); if their class "
            "numbers mean the same, write --data.num_classes 5 for all sets",
        ),
        (
            other_set(fields={"image": Image((4, 4, 1))}),
            "'other' of --data.mix: its fields are image, those of 'synthetic' are image, label",
        ),
        (
            other_set(fields=images((None, None, 1))),
            r"image: 'other' has images of several sizes, .* write --data.image_size 224",
        ),
    ],
)
def test_sets_that_differ_are_refused_by_name_field_and_both_values(other, says):
    with pytest.raises(UsageError, match=says):
        mixed(FIRST, [Portion(other, 0.5)], MEMORY)


def test_class_names_have_to_agree_if_both_sets_have_them():
    first = dataclasses.replace(FIRST, fields=images((4, 4, 1), names=("cat", "dog", "owl")))
    swapped = other_set(fields=images((4, 4, 1), names=("cat", "owl", "dog")))
    with pytest.raises(UsageError, match="its label is 'owl' as class 1, that of 'synthetic' is 'dog' as class 1"):
        mixed(first, [Portion(swapped, 0.5)], MEMORY)
    fewer = other_set(fields=images((4, 4, 1), classes=2, names=("cat", "dog")))
    with pytest.raises(UsageError, match="its label is without a class 2, that of 'synthetic' is 'owl' as class 2"):
        mixed(first, [Portion(fewer, 0.5)], MEMORY)
    same = other_set(fields=first.fields)
    assert len(mixed(first, [Portion(same, 0.5)], MEMORY).trained_on) == 2


@pytest.mark.parametrize("turned", [False, True])
def test_class_numbers_without_names_are_not_mixed_with_named_classes_unless_the_user_says_that_they_agree(turned):
    first = dataclasses.replace(FIRST, fields=images((4, 4, 1), names=("cat", "dog", "owl")))
    first, other = (other_set(), first) if turned else (first, other_set())
    taken = "class numbers of 'other', .* are taken for those of 'synthetic': 0 = cat, 1 = dog, 2 = owl"
    with pytest.raises(UsageError, match=f"{taken}; if they mean that, write --data.num_classes 3; if not, give 'oth"):
        mixed(first, [Portion(other, 0.5)], MEMORY)
    with pytest.warns(DataWarning, match=f"{taken}$"):
        mixed(first, [Portion(other, 0.5)], dataclasses.replace(MEMORY, num_classes=3))


def test_class_names_that_are_the_numbers_agree_with_numbers():
    digits = dataclasses.replace(FIRST, fields=images((4, 4, 1), names=("0", "1", "2")))
    assert len(mixed(digits, [Portion(other_set(), 0.5)], MEMORY).trained_on) == 2


def test_a_set_of_floating_point_images_is_not_mixed_with_one_of_bytes():
    class Floats(list):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    floats = other_set(train=Floats([{"image": np.full((4, 4, 1), 0.5), "label": 0}]))
    with pytest.raises(UsageError, match="its image is float32, that of 'synthetic' is uint8; uint8 is scaled"):
        mixed(FIRST, [Portion(floats, 0.5)], MEMORY)


def test_sets_of_any_size_are_mixed_when_they_are_resized_each_as_it_would_be_alone():
    config = dataclasses.replace(MEMORY, image_size=5)
    varying = synthetic_source(3, (40, 30, 1), 2, seed=1)
    varying = dataclasses.replace(varying, fields=images((None, None, 1)))
    source = mixed(FIRST, [Portion(varying, 0.5)], config)
    assert not source.varies
    batches = train_batches(source, config, 0)
    assert isinstance(batches, StreamedBatches)
    alone = train_batches(FIRST, config, 0)
    whole = {image.tobytes() for batch in take(alone, 0, 4) for image in batch["image"]}
    found = [image.tobytes() for batch in take(batches, 0, 4) for image in batch["image"]]
    assert {batch["image"].shape for batch in take(batches, 0, 2)} == {(20, 5, 5, 1)}
    assert 30 < sum(image in whole for image in found) < 50  # half: those of the first set, which are not cropped
    halves = [take(train_batches(source, config, 0, Share(index, 2)), 0, 1)[0]["image"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), take(batches, 0, 1)[0]["image"])  # a crop is of its example
    (one,), (other,) = (eval_batches(some, config) for some in (source, FIRST))
    np.testing.assert_array_equal(one["image"], other["image"])


def write_folder(path, value, kinds=("a", "b")):
    for kind in kinds:
        folder = path / "train" / kind
        folder.mkdir(parents=True)
        for index in range(3):
            Picture.fromarray(np.full((4, 4), value + index, np.uint8)).save(folder / f"{kind}{index}.png")
    return path


def test_sets_are_opened_by_name_and_only_the_first_needs_a_test_split(tmp_path):
    first, other = write_folder(tmp_path / "one", 0), write_folder(tmp_path / "two", 100)
    config = Data(name=f"folder:{first}", mix={f"folder:{other}": 0.5}, test_split="train[:2]", batch_size=10)
    source = open_source(config, tmp_path)
    assert [len(part.train) for part in source.trained_on] == [6, 6]
    (batch,) = take(train_batches(source, config, 0), 0, 1)
    assert {pixel // 100 for pixel in batch["image"][:, 0, 0, 0].tolist()} == {0, 1}
    fewer = write_folder(tmp_path / "three", 0, kinds=("a", "c"))
    with pytest.raises(UsageError, match=r"its label is 'c' as class 1, that of .*one' is 'b' as class 1"):
        open_source(dataclasses.replace(config, mix={f"folder:{fewer}": 0.5}), tmp_path)


OWN = """
import numpy as np

def some(count, value):
    texts = [value * 7] * count
    image = np.full((count, 4, 4, 1), ord(value), np.uint8)
    mask = np.tile(np.arange(2), (count, 4, 2))
    return {"image": image, "mask": mask, "text": texts}

def one():
    return some(40, "a"), some(3, "a")

def two():
    return {"train": some(40, "b")}
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return Data(name=f"{file}:one", mix={f"{file}:two": 0.2}, batch_size=20)


def test_segmentation_with_functions_of_the_users(own, tmp_path):
    own = dataclasses.replace(own, num_classes=2)
    source = open_source(own, pathlib.Path(), "segmentation")
    batch = take(train_batches(source, own, 0), 0, 1)[0]
    assert (batch["image"].shape, batch["mask"].shape) == ((20, 4, 4, 1), (20, 4, 4))
    assert set(batch["image"][:, 0, 0, 0].tolist()) == {ord("a"), ord("b")}


def test_language_models_get_blocks_of_each_set(own):
    config = dataclasses.replace(own, length=15)
    source = open_source(config, pathlib.Path(), "language_modeling")
    assert source.fields == {"tokens": Tokens(16, 259)}
    blocks = np.concatenate([batch["tokens"] for batch in take(train_batches(source, config, 0), 0, 50)])
    a, b = ((blocks == ord(letter) + 3).any(1) for letter in "ab")
    assert (np.count_nonzero(a), np.count_nonzero(b), np.count_nonzero(a & b)) == (800, 200, 0)


def test_a_source_of_the_users_has_a_mixture_too(tmp_path):
    file = tmp_path / "ready.py"
    file.write_text("from mpjax.data import synthetic_source\ndef source(): return synthetic_source(3, (4, 4, 1), 50)")
    config = Data(name=f"{file}:source", mix={"synthetic:4x4x1:3": 0.1}, batch_size=8)
    assert [len(part.train) for part in open_source(config, tmp_path).trained_on] == [50, 16]


TWO = Data(name="hf:a.tsv", mix={"b c.tsv": 0.2, "other": 0.1})


@pytest.mark.parametrize(
    ("name", "error", "says", "repair"),
    [
        (
            "b c.tsv",
            UsageError("write --data.name hf:b c.tsv", repair={"data.name": "hf:b c.tsv"}),
            "'b c.tsv' of --data.mix: write --data.mix 'hf:b c.tsv' 0.2 other 0.1",
            {"data.mix": {"hf:b c.tsv": 0.2, "other": 0.1}},
        ),
        (
            "other",
            UsageError("copy it, write --data.name hf:DIR; or not"),
            "'other' of --data.mix: copy it, write --data.mix 'b c.tsv' 0.2 hf:DIR 0.1; or not",
            {},
        ),
        (
            "other",
            UsageError("write --data.header x y", repair={"data.header": ("x", "y")}),
            "'other' of --data.mix: write --data.header x y; settings of --data are for all sets, and 'hf:a.tsv' can "
            "be opened with those given: give this file a line of names instead, or open it by a function of your own "
            "(docs/data.md: several sets in one run)",
            {},
        ),
        (
            "hf:a.tsv",
            UsageError("leave it out", repair={"data.header": ()}),
            "'hf:a.tsv' of --data.name: leave it out",
            {"data.header": ()},
        ),
        ("hf:a.tsv", UsageError("data set 'hf:a.tsv' is empty"), "data set 'hf:a.tsv' is empty", {}),
    ],
)
def test_an_error_of_a_set_names_it_and_proposes_no_setting_that_changes_the_others(name, error, says, repair):
    with pytest.raises(UsageError) as refused, named(name, TWO):
        raise error
    assert (str(refused.value), refused.value.repair) == (says, repair)


def test_a_set_that_cannot_be_opened_is_named(tmp_path):
    config = Data(name="synthetic:4x4x1:3", mix={f"folder:{tmp_path}/no": 0.5})
    with pytest.raises(UsageError, match=r"^'folder:.*/no' of --data.mix: "):
        open_source(config, tmp_path)
