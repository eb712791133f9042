"""Builds the training and evaluation batches of a data set, from memory or from a stream that threads decode."""

from collections.abc import Iterator

import numpy as np

from mpjax.config.limits import check_data
from mpjax.config.schema import Data
from mpjax.data.augment.on_device import normalisation
from mpjax.data.example_reader import reader
from mpjax.data.examples import Source, require_examples
from mpjax.data.fields import Image
from mpjax.data.images.resizing import draws
from mpjax.data.order import epoch_size, order_of
from mpjax.data.orientation import orientation_of
from mpjax.data.read import Split, SplitOfOne, fits_in_memory, read_all
from mpjax.data.stacking import require_dtypes
from mpjax.data.stream import WHOLE, Batch, Batches, BatchesInMemory, EvalBatches, Share, StreamedBatches, prefetched
from mpjax.errors import UsageError


def train_batches(source: Source, config: Data, seed: int, share: Share = WHOLE) -> Batches:
    """Builds endless shuffled batches of `source.train`, mixed with the training examples of the sets in `source.mix`.

    If `fits_in_memory`, all examples are read into memory before this function returns. Otherwise threads read them
    from disk batch by batch; the shuffled order of a single set (no mixture) then differs from its order in memory.
    With `config.alternate_flips`, batches have the additional field `mirrored`, bool [B].

    Args:
      source: the data set, or the first of a mixture.
      config: batch and image size, memory and threads. `batch_size` is the global batch, over all processes.
      seed: the seed of the shuffle, of the crops on the host and of the alternating flips.
      share: the rows of each global batch that this process reads; only these are yielded.

    Raises:
      UsageError: `config` is invalid for the set, an epoch is smaller than a batch, `seed` is not in [0, 2**32), or
        an example does not match its fields (`conform`). A streamed example is checked only when it is read. A batch
        that does not divide among the processes is an error here if streamed, else when the first batch is read.
    """
    check_data(config)
    require_batch(source, config)
    batch_size = config.batch_size
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed: got {seed}; wanted 0 to 2**32 - 1, as in --seed 0")
    read = reader(source, config, training=True)
    for field in read.fields.values():
        if isinstance(field, Image):
            normalisation(config, field.shape[2])  # raises here, before the run writes anything
    orientation = orientation_of(config, read.fields, seed) if config.alternate_flips else None
    split, order = training_split(source, config), order_of(source, batch_size, seed)
    if fits_in_memory(source, config, read):
        return BatchesInMemory(read_all(split, config.workers), order, share, orientation)
    import grain

    if source.mix:
        positions = grain.MapDataset.range(order.steps_per_epoch).seed(seed).repeat()
        indices = positions.map_with_index(lambda position, _: order.example_numbers(position))
    else:  # grain's shuffle stores no permutation of a large set
        indices = (
            grain.MapDataset.range(len(source.train))
            .seed(seed)
            .shuffle()
            .batch(batch_size, drop_remainder=True)
            .repeat()
        )
    rows = share.rows(batch_size)
    _ = split.first  # read once here, not by each thread

    def batch(chosen: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, Batch]:
        # The draws cover the global batch, so the crop of an example does not depend on the number of processes.
        drawn = draws(rng, len(chosen))
        return chosen[rows], split.batch(chosen[rows], drawn[rows])

    def oriented(position: int, read: tuple[np.ndarray, Batch]) -> Batch:
        chosen, arrays = read
        return arrays | orientation.of(chosen, order.epochs(position)[rows]) if orientation else arrays

    batches = indices.random_map(batch).map_with_index(oriented)
    return StreamedBatches(batches, batch_size, order.steps_per_epoch, config.workers)


def require_batch(source: Source, config: Data) -> None:
    """Raises UsageError if a training set is empty, or if an epoch (`epoch_size`) has fewer examples than a batch.

    The error proposes, as a repair, the largest power of two that is at most the size of an epoch.
    """
    for member in source.trained_on:
        require_examples(config.train_split, len(member.train))
    size = epoch_size(source)
    if config.batch_size > size:
        split_name = f"split '{config.train_split}' of '{source.name}'"
        has = f"one pass through {split_name}, an epoch of the mixture, takes" if source.mix else f"{split_name} has"
        raise UsageError(
            f"{has} {size} examples, fewer than one batch of {config.batch_size}; write --data.batch_size {size} or "
            "less",
            repair={"data.batch_size": 2 ** (size.bit_length() - 1)},
        )


def training_split(source: Source, config: Data) -> Split:
    """Builds the `Split` of the training examples of `source`, followed by the examples of the sets in `source.mix`.

    No example is read here; the split reads one from disk when a batch asks for it.

    Raises:
      UsageError: see `reader`.
    """
    if source.mix:
        from mpjax.data.mixture import mixed_split  # local, because few runs mix sets

        return mixed_split(source, config)
    return SplitOfOne(source.train, reader(source, config, training=True))


def eval_batches(source: Source, config: Data, share: Share = WHOLE) -> EvalBatches:
    """Builds batches of all of `source.test` in order, each of `config.eval_batch_size` examples over all processes.

    If `fits_in_memory`, all examples are read into memory before this function returns; otherwise threads read them
    from disk batch by batch. The last batch is padded with zeros to the full size: the field `weight`, float32 [B], is
    1 for an example and 0 for padding. Each batch holds only the rows of `share`, the rows that this process reads.

    Raises:
      UsageError: one of the splits is empty, `config` is invalid for the set, an example does not match its fields
        (`conform`), the first examples of the two splits differ in dtype, or examples are compared with each other and
        the last batch has one alone. A streamed example is checked only when
        it is read.
    """
    size, batch_size = len(source.test), config.tested
    check_data(config)
    require_examples(config.test_split, size)
    compares = "positive" in source.fields or {"image", "tokens"} <= source.fields.keys()
    if compares and size % batch_size == 1:
        fitting = next((other for other in range(batch_size + 1, size + 1) if size % other != 1), None)
        advice = f"write --data.eval_batch_size {fitting}" if fitting else "write another --data.test_split"
        raise UsageError(
            f"--data.eval_batch_size {batch_size}: {config.test_split} has {size} examples, and the last batch one "
            f"alone, which has no other to be compared with: {advice}"
        )
    require_examples(config.train_split, len(source.train))  # whose dtypes the test split has to have
    read = reader(source, config, training=False)
    split, trained = SplitOfOne(source.test, read), SplitOfOne(source.train, reader(source, config, training=True))
    require_dtypes(split.first, trained.first, 0, read.name)
    if fits_in_memory(source, config, read):
        whole = read_all(split, config.workers)

        def slices() -> Iterator[Batch]:
            for start in range(0, size, batch_size):
                yield {name: values[start : start + batch_size] for name, values in whole.items()}

        return EvalBatches(slices, size, batch_size, share, whole)
    import grain

    batches = grain.MapDataset.range(size).batch(batch_size).map(split.batch)
    return EvalBatches(lambda: prefetched(batches, config.workers), size, batch_size, share)
