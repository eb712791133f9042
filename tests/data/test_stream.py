import dataclasses
import itertools

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import Share, StreamedBatches, as_task, eval_batches, labelled_images, train_batches
from mpjax.data.sources import open_prepared, synthetic_source
from mpjax.errors import UsageError


SOURCE = synthetic_source(3, (4, 4, 1), 23)
MEMORY = Data(batch_size=5, eval_batch_size=10)
STREAM = dataclasses.replace(MEMORY, in_memory_mb=0)
UNTHREADED = dataclasses.replace(STREAM, workers=0)
every_kind = pytest.mark.parametrize(
    "config",
    [MEMORY, STREAM, pytest.param(UNTHREADED, marks=pytest.mark.slow)],  # whose batches are those of STREAM: below
    ids=["memory", "stream", "unthreaded"],
)


@pytest.fixture(scope="module")
def jpegs(tiny_sets):
    return as_task(open_prepared(Data(name="tiny_jpeg"), tiny_sets), "classification", Data())


def take(batches, position, count):
    return list(itertools.islice(batches.from_position(position), count))


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["label"], other["label"])


def image_numbers(batches):
    """Which images were seen, by their content."""
    known = {SOURCE.train[index]["image"].tobytes(): index for index in range(23)}
    return [known[image.tobytes()] for batch in batches for image in batch["image"]]


@every_kind
def test_shapes_and_dtypes(config):
    batches = train_batches(SOURCE, config, 0)
    assert (batches.batch_size, batches.steps_per_epoch) == (5, 4)
    (batch,) = take(batches, 0, 1)
    assert (batch["image"].shape, batch["image"].dtype) == ((5, 4, 4, 1), np.uint8)
    assert (batch["label"].shape, batch["label"].dtype) == ((5,), np.int32)


@every_kind
@pytest.mark.parametrize("position", [1, pytest.param(3, marks=pytest.mark.slow), 4, 9])
def test_a_batch_is_the_same_from_wherever_reading_starts(config, position):
    batches = train_batches(SOURCE, config, 0)
    assert_equal(take(batches, position, 6), take(batches, 0, position + 6)[position:])
    assert_equal(take(train_batches(SOURCE, config, 0), position, 2), take(batches, position, 2))


def test_threads_do_not_change_batches():
    assert_equal(take(train_batches(SOURCE, STREAM, 0), 2, 9), take(train_batches(SOURCE, UNTHREADED, 0), 2, 9))


@every_kind
def test_no_image_twice_in_an_epoch_and_another_order_in_the_next(config):
    batches = train_batches(SOURCE, config, 0)
    first, second = image_numbers(take(batches, 0, 4)), image_numbers(take(batches, 4, 4))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second
    assert set(first) != set(second)  # what is left over differs
    assert first != sorted(first)


@every_kind
def test_labels_stay_with_their_images(config):
    batches = take(train_batches(SOURCE, config, 0), 0, 8)
    assert [number % 3 for number in image_numbers(batches)] == np.concatenate([b["label"] for b in batches]).tolist()


@every_kind
def test_seeds_give_other_orders_and_not_each_others_epochs(config):
    zero, one = (image_numbers(take(train_batches(SOURCE, config, seed), 0, 8)) for seed in (0, 1))
    assert zero[:20] != one[:20]
    assert zero[20:] != one[:20]


@every_kind
def test_images_from_memory_are_not_views(config):
    batches = train_batches(SOURCE, config, 0)
    for batch in take(batches, 0, 2):
        batch["image"][:] = 0
    assert take(batches, 0, 1)[0]["image"].any()


def test_random_parts_follow_from_the_position(jpegs):
    config = Data(batch_size=4, image_size=16)
    batches = train_batches(jpegs, config, 0)
    assert isinstance(batches, StreamedBatches)
    whole = take(batches, 0, 7)
    assert whole[0]["image"].shape == (4, 16, 16, 3)
    assert_equal(take(train_batches(jpegs, config, 0), 5, 2), whole[5:])


def test_random_parts_differ_between_epochs():
    source = dataclasses.replace(synthetic_source(1, (40, 30, 3), 1), fields=labelled_images(1, (None, None, 3)))
    first, second = take(train_batches(source, Data(batch_size=1, image_size=8), 0), 0, 2)
    assert (first["image"] != second["image"]).any()


def test_evaluation_of_images_that_vary(jpegs):
    batches = list(eval_batches(jpegs, Data(eval_batch_size=2, image_size=16)))
    assert [batch["image"].shape for batch in batches] == [(2, 16, 16, 3)] * 2
    assert batches[0]["image"][1, 8, 8].tolist() == pytest.approx([217, 217, 217], abs=3)  # CMYK: 235 * 235 / 255
    assert np.concatenate([batch["weight"] for batch in batches]).tolist() == [1, 1, 1, 0]


@every_kind
def test_evaluation_is_one_pass_in_order_with_weights(config):
    batches = eval_batches(SOURCE, config)
    assert len(batches) == 3
    for _ in range(2):
        whole = list(batches)
        assert [batch["image"].shape for batch in whole] == [(10, 4, 4, 1)] * 3
        assert all(batch["weight"].dtype == np.float32 for batch in whole)
        assert [batch["weight"].sum() for batch in whole] == [10, 10, 3]
        assert np.concatenate([batch["label"] for batch in whole])[:23].tolist() == [i % 3 for i in range(23)]
        np.testing.assert_array_equal(whole[2]["image"][2], SOURCE.test[22]["image"])
        assert whole[2]["weight"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
        assert not whole[2]["image"][3:].any()
        assert not whole[2]["label"][3:].any()


def test_a_split_that_fills_its_batches_gets_no_more():
    assert [batch["weight"].sum() for batch in eval_batches(SOURCE, Data(eval_batch_size=23))] == [23]


@every_kind
def test_labels_out_of_range_are_refused(config):
    wrong = dataclasses.replace(SOURCE, fields=labelled_images(2, (4, 4, 1)))
    with pytest.raises(UsageError, match=r"label: 2 is outside \[0, 2\)"):
        take(train_batches(wrong, config, 0), 0, 4)
    with pytest.raises(UsageError, match=r"label: 2 is outside \[0, 2\)"):
        list(eval_batches(wrong, config))


@every_kind
@pytest.mark.parametrize("count", [2, 5])
def test_processes_read_their_rows_of_the_same_batches(config, count):
    config = dataclasses.replace(config, batch_size=10)
    whole = take(train_batches(SOURCE, config, 0), 1, 3)
    parts = [take(train_batches(SOURCE, config, 0, Share(index, count)), 1, 3) for index in range(count)]
    for step, batch in enumerate(whole):
        rows = [part[step]["image"] for part in parts]
        assert {len(images) for images in rows} == {10 // count}
        np.testing.assert_array_equal(np.concatenate(rows), batch["image"])


def test_an_image_is_cut_alike_by_whichever_process_reads_it(jpegs):
    config = Data(image_size=4, batch_size=4)
    (whole,) = take(train_batches(jpegs, config, 0), 0, 1)
    halves = [take(train_batches(jpegs, config, 0, Share(index, 2)), 0, 1)[0]["image"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), whole["image"])


def test_processes_evaluate_every_example_once():
    parts = [list(eval_batches(SOURCE, MEMORY, Share(index, 2))) for index in range(2)]
    assert [[int(batch["weight"].sum()) for batch in part] for part in parts] == [[5, 5, 3], [5, 5, 0]]


def test_a_batch_that_does_not_divide_among_processes_is_refused():
    with pytest.raises(UsageError, match="a batch of 5 examples does not divide among 2 processes"):
        take(train_batches(SOURCE, MEMORY, 0, Share(0, 2)), 0, 1)


ALTERNATING = {"flip": True, "alternate_flips": True}


@every_kind
@pytest.mark.parametrize("shares", [1, 2])
def test_each_image_is_seen_in_both_orientations_in_each_two_epochs(config, shares):
    config = dataclasses.replace(config, batch_size=4, **ALTERNATING)
    whole = [train_batches(SOURCE, config, 0, Share(index, shares)) for index in range(shares)]
    assert whole[0].steps_per_epoch == 5
    # Read from the middle of an epoch on, as a resumed run reads.
    parts = [take(batches, 12, 18) for batches in whole]
    seen = {epoch: {} for epoch in (2, 3, 4, 5)}
    for batches in parts:
        for position, batch in enumerate(batches, start=12):
            assert batch["mirrored"].dtype == bool
            for number, mirrored in zip(image_numbers([batch]), batch["mirrored"], strict=True):
                seen[position // 5][number] = bool(mirrored)
    assert [len(seen[epoch]) for epoch in (2, 3, 4, 5)] == [12, 20, 20, 20]
    for epoch in (2, 3, 4):
        both = seen[epoch].keys() & seen[epoch + 1].keys()
        assert len(both) >= 9  # 3 of 23 images are left out of each epoch
        assert all(seen[epoch][number] != seen[epoch + 1][number] for number in both)


def test_orientations_change_no_batch_and_are_those_of_memory_and_stream_alike():
    for config in (MEMORY, STREAM):
        plain = take(train_batches(SOURCE, config, 0), 0, 6)
        flips = take(train_batches(SOURCE, dataclasses.replace(config, **ALTERNATING), 0), 0, 6)
        assert_equal(plain, flips)
        assert all("mirrored" not in batch for batch in plain)
    memory, stream = (
        take(train_batches(SOURCE, dataclasses.replace(config, **ALTERNATING), 0), 0, 4) for config in (MEMORY, STREAM)
    )
    first = [
        dict(zip(image_numbers(batches), np.concatenate([b["mirrored"] for b in batches]).tolist(), strict=True))
        for batches in (memory, stream)
    ]
    both = first[0].keys() & first[1].keys()
    assert len(both) >= 17
    assert {first[0][number] for number in both} == {True, False}
    assert all(first[0][number] == first[1][number] for number in both)


def test_crops_do_not_depend_on_orientations(jpegs):
    config = Data(image_size=4, batch_size=4)
    (plain,) = take(train_batches(jpegs, config, 0), 1, 1)
    (flips,) = take(train_batches(jpegs, dataclasses.replace(config, **ALTERNATING), 0), 1, 1)
    np.testing.assert_array_equal(plain["image"], flips["image"])
