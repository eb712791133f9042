"""Examples per second that reach the device, beside grain's defaults, tf.data and torch's DataLoader, in one run.

The same work for all: 32x32 images from memory, shifted by up to 4 pixels, mirrored and normalised, in batches of 512;
and JPEG photographs of 500x375 from memory, a random part of each resized to 224x224, mirrored and normalised, in
batches of 128. The photographs are resized with antialiasing, which is what mpjax, Pillow and torchvision do unless
told otherwise, and without, which is what tf.data does. Each library does it as its documentation has it; mpjax moves,
mirrors and normalises on the device, inside a compiled function. Each loader has a process of its own, with the memory
settings of mpjax's commands where its name says so and for mpjax itself. Runs are interleaved; a run ends when its last
batch is float32 on the device.

    pip install torch torchvision tensorflow
    python benchmarks/input.py --output benchmarks/results/input_cpu.json

A peer that is not installed is left out by name.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.util
import io
import json
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grain
import jax
import numpy as np
from PIL import Image


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import describe

from mpjax import data
from mpjax.commands import keep_freed_memory
from mpjax.config import Data
from mpjax.data import Source, labelled_images
from mpjax.data.images import draws, random_part


MEAN, STD = 0.45, 0.22
PADDING, SMALL, SMALL_BATCH, SMALL_COUNT = 4, 32, 512, 50_000
SIZE, LARGE_BATCH, LARGE_COUNT, LARGE_TIMES = 224, 128, 1024, 16
WARM_UP = 8  # batches: as many as a loader may hold ready before it is asked
WORKERS = 2

Loader = Callable[[], Iterator[jax.Array]]


class Rows(list):
    """Examples that can be read several at once."""

    def __getitems__(self, indices) -> list:
        return [self[index] for index in indices]


def small_images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (SMALL_COUNT, SMALL, SMALL, 3), np.uint8)


def photographs() -> list[bytes]:
    """JPEG files of 500x375: parts of scikit-learn's two sample photographs."""
    # Imported late: it starts threads, whose memory `keep_freed_memory` could not set any more.
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(image) for image in load_sample_images().images]
    files = []
    for number in range(LARGE_COUNT):
        picture = pictures[number % 2]
        left, top = int(rng.integers(picture.width - 500)), int(rng.integers(picture.height - 375))
        buffer = io.BytesIO()
        picture.crop((left, top, left + 500, top + 375)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files * LARGE_TIMES  # an epoch longer than what loaders read ahead


# --- mpjax -----------------------------------------------------------------------------------------------------------


def with_mpjax(source: Source, config: Data) -> Loader:
    batches = data.train_batches(source, config, seed=0)
    fields = data.batch_fields(source, config)

    @jax.jit
    def prepare(batch, step):
        key = jax.random.fold_in(jax.random.key(0), step)
        return data.prepare(batch, key, config=config, fields=fields)["image"]

    def load() -> Iterator[jax.Array]:
        stream = batches.from_position(0)
        for step in range(batches.steps_per_epoch):
            yield prepare(jax.device_put(next(stream)), step)

    return load


def mpjax_small(images: np.ndarray) -> Loader:
    rows = Rows({"image": image, "label": 0} for image in images)
    config = Data(batch_size=SMALL_BATCH, crop_padding=PADDING, flip=True, mean=(MEAN,), std=(STD,))
    return with_mpjax(Source("small", labelled_images(1, (SMALL, SMALL, 3)), rows, rows), config)


def uint8_batches(files: list[bytes]) -> Loader:
    """What the host does of `mpjax_large`, for a device that does the rest: batches before they are prepared."""
    batches = data.train_batches(*large(files, antialias=False), seed=0)

    def load() -> Iterator[jax.Array]:
        stream = batches.from_position(0)
        for _ in range(batches.steps_per_epoch):
            yield jax.device_put(next(stream)["image"])

    return load


def mpjax_large(files: list[bytes], *, antialias: bool) -> Loader:
    return with_mpjax(*large(files, antialias=antialias))


def large(files: list[bytes], *, antialias: bool) -> tuple[Source, Data]:
    rows = Rows({"image": file, "label": 0} for file in files)
    config = Data(
        batch_size=LARGE_BATCH,
        image_size=SIZE,
        antialias=antialias,
        workers=WORKERS,
        crop_padding=0,
        flip=True,
        mean=(MEAN,),
        std=(STD,),
    )
    return Source("large", labelled_images(1, (None, None, 3)), rows, rows), config


# --- The peers -------------------------------------------------------------------------------------------------------


def shifted_and_mirrored(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    padded = np.pad(image, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    top, left = rng.integers(0, 2 * PADDING + 1, 2)
    return normalised(mirrored(padded[top : top + SMALL, left : left + SMALL], rng))


def part_of_photograph(file: bytes, rng: np.random.Generator) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as picture:
        box = random_part(*picture.size, draws(rng, 1)[0])
        image = np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))
    return normalised(mirrored(image, rng))


def mirrored(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image[:, ::-1] if rng.random() < 0.5 else image


def normalised(image: np.ndarray) -> np.ndarray:
    return (image.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)


def with_grain(stored, transform: Callable, batch_size: int) -> Loader:
    """As grain's documentation has it, its default read options."""
    dataset = grain.MapDataset.source(stored).seed(0).shuffle().random_map(transform)
    dataset = dataset.batch(batch_size, drop_remainder=True)

    def load() -> Iterator[jax.Array]:
        for batch in dataset.to_iter_dataset():
            yield jax.device_put(batch)

    return load


def with_torch(stored, transform: Callable, batch_size: int) -> Loader:
    import torch

    class Examples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(stored)

        def __getitem__(self, index: int) -> np.ndarray:
            return transform(stored[index], np.random.default_rng(torch.initial_seed() % 2**32 + index))

    def load() -> Iterator[jax.Array]:
        loader = torch.utils.data.DataLoader(
            Examples(), batch_size, shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=False
        )
        for batch in loader:
            yield jax.device_put(batch.numpy())

    return load


def with_tensorflow(dataset, transform: Callable, count: int, batch_size: int) -> Loader:
    import tensorflow as tf

    dataset = dataset.shuffle(count, seed=0).map(transform, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def load() -> Iterator[jax.Array]:
        for batch in dataset.as_numpy_iterator():
            yield jax.device_put(batch)

    return load


def tensorflow_small(images: np.ndarray) -> Loader:
    import tensorflow as tf

    def transform(image):
        padded = tf.pad(image, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]])
        image = tf.image.random_flip_left_right(tf.image.random_crop(padded, (SMALL, SMALL, 3)))
        return (tf.cast(image, tf.float32) / 255 - MEAN) / STD

    return with_tensorflow(tf.data.Dataset.from_tensor_slices(images), transform, len(images), SMALL_BATCH)


def tensorflow_large(files: list[bytes], *, antialias: bool) -> Loader:
    import tensorflow as tf

    def transform(file):
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(file),
            tf.zeros((1, 0, 4)),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.image.decode_and_crop_jpeg(file, window, channels=3)
        image = tf.image.random_flip_left_right(tf.image.resize(image, (SIZE, SIZE), antialias=antialias))
        return (image / 255 - MEAN) / STD

    return with_tensorflow(tf.data.Dataset.from_tensor_slices(files), transform, len(files), LARGE_BATCH)


# --- Measuring -------------------------------------------------------------------------------------------------------


def rate(load: Loader, batch_size: int, seconds: float) -> tuple[float, float]:
    """Examples per second over whole batches, until one pass or `seconds` are over, the first ones left out.

    And milliseconds of processor time per example, user's and kernel's, of all threads; processes are not counted.
    """
    batches = load()
    for _ in range(WARM_UP):
        jax.block_until_ready(next(batches))
    began, used, count, loaded = time.perf_counter(), time.process_time(), 0, []
    for batch in batches:
        loaded = [*loaded[-1:], batch]  # two at a time: memory is not what is measured
        count += 1
        if time.perf_counter() - began > seconds:
            break
    jax.block_until_ready(loaded)
    examples = count * batch_size
    return examples / (time.perf_counter() - began), 1000 * (time.process_time() - used) / examples


@functools.cache
def _loader(task: str, name: str) -> Loader:
    return TASKS[task].loaders[name]()


def measure(task: str, name: str, seconds: float) -> tuple[float, float]:
    """Measures one loader, in the process that it has for itself."""
    return rate(_loader(task, name), TASKS[task].batch_size, seconds)


def begin(name: str) -> None:
    """Prepares a loader's process."""
    if name.startswith("mpjax") or name.endswith(KEPT):
        keep_freed_memory()


def compare(task: str, repeats: int, seconds: float) -> dict:
    names = [name for name in TASKS[task].loaders if installed(*NEEDS.get(name, ()))]
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        own = multiprocessing.get_context("spawn")
        processes = {
            name: stack.enter_context(
                concurrent.futures.ProcessPoolExecutor(1, mp_context=own, initializer=begin, initargs=(name,))
            )
            for name in names
        }
        for _ in range(repeats):
            for name in names:
                speed, cost = processes[name].submit(measure, task, name, seconds).result()
                rates[name].append(speed)
                costs[name].append(cost)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    fastest = max((name for name in medians if not name.startswith("mpjax")), key=medians.__getitem__)
    ratios = sorted(own / other for own, other in zip(rates["mpjax"], rates[fastest], strict=True))
    return {
        "relative_rates": {name: value / medians["mpjax"] for name, value in medians.items()},
        "fastest_peer": fastest,
        "mpjax_to_fastest_peer": {"median": statistics.median(ratios), "range": [ratios[0], ratios[-1]]},
        "processor_ms_per_example": {name: statistics.median(values) for name, values in costs.items()},
        "repeats": repeats,
    }


def installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


class Task(NamedTuple):
    """Loaders that do the same work, by name; each is built in its own process."""

    batch_size: int
    loaders: dict[str, Callable[[], Loader]]


KEPT = ", memory kept"
NEEDS = {"torch": ("torch",), "tf.data": ("tensorflow",), f"tf.data{KEPT}": ("tensorflow",)}
TASKS = {
    "in memory, 32x32": Task(
        SMALL_BATCH,
        {
            "mpjax": lambda: mpjax_small(small_images()),
            "grain": lambda: with_grain(small_images(), shifted_and_mirrored, SMALL_BATCH),
            "torch": lambda: with_torch(small_images(), shifted_and_mirrored, SMALL_BATCH),
            "tf.data": lambda: tensorflow_small(small_images()),
        },
    ),
    "JPEG to 224x224, antialiased": Task(
        LARGE_BATCH,
        {
            "mpjax": lambda: mpjax_large(photographs(), antialias=True),
            "grain": lambda: with_grain(photographs(), part_of_photograph, LARGE_BATCH),
            "torch": lambda: with_torch(photographs(), part_of_photograph, LARGE_BATCH),
            "tf.data": lambda: tensorflow_large(photographs(), antialias=True),
        },
    ),
    "JPEG to 224x224": Task(
        LARGE_BATCH,
        {
            "mpjax": lambda: mpjax_large(photographs(), antialias=False),
            "mpjax, antialiased": lambda: mpjax_large(photographs(), antialias=True),
            "mpjax, uint8": lambda: uint8_batches(photographs()),
            "tf.data": lambda: tensorflow_large(photographs(), antialias=False),
            f"tf.data{KEPT}": lambda: tensorflow_large(photographs(), antialias=False),
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="", help="the task to measure, such as 'JPEG to 224x224'")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    chosen = [task for task in TASKS if arguments.only in ("", task)]
    if not installed("tensorflow"):  # the only peer that resizes without antialiasing
        chosen = [task for task in chosen if task != "JPEG to 224x224"]
    found = {task: compare(task, arguments.repeats, arguments.seconds) for task in chosen}
    absent = [name for name in ("torch", "tensorflow") if not installed(name)]
    present = [name for name in ("grain", "torch", "tensorflow", "PIL", "simplejpeg", "cv2") if name not in absent]
    text = json.dumps({"machine": describe(*present), "not_installed": absent, "tasks": found}, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
