import dataclasses
import pathlib

import numpy as np
import pytest

from mpjax.config import Data, PythonObject
from mpjax.data import BatchesInMemory, StreamedBatches, eval_batches, open_source, train_batches
from mpjax.data.sources import synthetic_source
from mpjax.errors import UsageError


SOURCE = synthetic_source(3, (4, 4, 1), 23)
MEMORY = Data(batch_size=5, eval_batch_size=10)
STREAM = dataclasses.replace(MEMORY, in_memory_mb=0)


def test_small_sets_are_held_in_memory_and_large_ones_streamed():
    assert isinstance(train_batches(SOURCE, MEMORY, 0), BatchesInMemory)
    assert isinstance(train_batches(SOURCE, STREAM, 0), StreamedBatches)


@pytest.mark.parametrize(
    ("config", "seed", "says"),
    [
        (Data(batch_size=24), 0, "has 23 examples, fewer than one batch of 24; write --data.batch_size 23 or less"),
        (Data(batch_size=0), 0, "--data.batch_size is 0: wanted at least 1"),
        (Data(batch_size=5, workers=-1), 0, "--data.workers is -1: wanted 0 or more"),
        (Data(batch_size=5), -1, r"seed: got -1; wanted 0 to 2\*\*32 - 1"),
    ],
)
def test_training_refuses(config, seed, says):
    with pytest.raises(UsageError, match=says):
        train_batches(SOURCE, config, seed)


@pytest.mark.parametrize("setting", ["mean", "std"])
def test_a_normalisation_for_other_channels_is_refused_with_the_data(setting):
    config = Data(name="synthetic:8x8x3:10", batch_size=4, **{setting: (0.5, 0.5)})
    source = synthetic_source(10, (8, 8, 3), 8)
    with pytest.raises(UsageError, match=f"data.{setting}: got 2 values"):
        train_batches(source, config, 0)


def test_alternating_flips_without_flips_are_refused():
    config = dataclasses.replace(MEMORY, alternate_flips=True)
    with pytest.raises(UsageError, match="--data.alternate_flips without --data.flip: no image is flipped"):
        train_batches(SOURCE, config, 0)


@pytest.mark.parametrize("config", [MEMORY, STREAM], ids=["memory", "stream"])
@pytest.mark.parametrize("dtypes", [("uint8", "float32"), ("float32", "uint8")], ids="-".join)
def test_the_splits_have_one_dtype(config, dtypes):
    """Only uint8 pixels are scaled on the device: a model would be tested on numbers that it never saw."""
    train, test = ([{"image": np.zeros((4, 4, 1), dtype), "label": 0}] * 4 for dtype in dtypes)
    source = open_source(
        dataclasses.replace(config, name=PythonObject(lambda: (train, test)), num_classes=2), pathlib.Path()
    )
    said = f"example 0 of split 'test' of .* is {dtypes[1]}, others are {dtypes[0]}; wanted one dtype"
    with pytest.raises(UsageError, match=said):
        eval_batches(source, config)
