"""Draws images with the diffusion network of a run, and writes them as PNG."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any, TextIO

import jax
import numpy as np
from PIL import Image

from mpjax import strict_json
from mpjax.commands.evaluate import open_to_predict, trained_state
from mpjax.config.commands import Prediction
from mpjax.config.paths import expanded
from mpjax.config.schema import Config
from mpjax.data.example_reader import batch_fields
from mpjax.errors import UsageError
from mpjax.training.ddim import ddim_steps, drawing
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh, put_on_devices
from mpjax.training.noise_levels import noise_schedule
from mpjax.training.predict_step import make_predict_step


def draw_images(settings: Prediction, config: Config, file: TextIO) -> int:
    """Draws `settings.images` images by a run with the settings `config`, and returns their number.

    It writes them, and a JSON line for each file to `file`.

    `settings.output` is a folder of one PNG for each image, or the PNG of all in one grid.

    Raises:
      UsageError: there is no such checkpoint, the run is of no diffusion, a class does not exist, a setting has no
        meaning for the run, images have more than 4 channels, or an output of the network is not finite.
    """
    if config.task != "diffusion":
        raise UsageError(f"the run in {settings.run} is for {config.task}: --images wants one with --task diffusion")
    plan, source, task = open_to_predict(settings, config)
    image: Any = batch_fields(source, config.data)["image"]
    shape = image.shape
    if shape[2] > 4:
        raise UsageError(f"images of {shape[2]} channels cannot be written as PNG: wanted 1 to 4")
    label: Any = source.fields.get("label")
    num_classes = label.num_classes if label else 0
    names = getattr(label, "names", ())
    classes = _classes(settings, config, num_classes, names)
    grid = settings.output.lower().endswith(".png")
    output = _prepared(settings.output, grid=grid)

    layout = Layout(make_mesh())
    _, state, _ = trained_state(
        task, config, source, pathlib.Path(settings.run), settings.checkpoint, layout, ema=settings.ema
    )
    outputs_of = drawing(
        plan.module_policy,
        shape,
        ddim_steps(noise_schedule(config.training.noise_schedule), settings.sampler_steps, settings.eta),
        prediction=config.training.prediction,
        num_classes=num_classes,
        guidance=settings.guidance,
        seed=settings.seed,
    )
    step = make_predict_step(task.structure, outputs_of, cast=task.cast, layout=layout)
    params = state.averaged if settings.ema else state.params
    size = min(settings.batch_size or config.data.tested, settings.images)
    sharding = layout.evaluation(size)
    images = []
    for start in range(0, settings.images, size):
        numbers = np.arange(start, start + size, dtype=np.int32)  # the last batch is filled up, for one program
        labels = {"label": classes[numbers % len(classes)]} if num_classes else {}
        batch = put_on_devices({"number": numbers, **labels}, sharding)
        drawn = jax.device_get(step(params, state.stats, batch))
        for number in range(start, min(start + size, settings.images)):
            if not drawn["finite"][number - start]:
                raise UsageError(
                    f"image {number}: an output of the model is not finite under {plan.policy}; write --policy "
                    "float32, or another --checkpoint"
                )
            pixels = _pixels(drawn["image"][number - start])
            if grid:
                images.append(pixels)
                continue
            path = output / f"{number:05}.png"
            Image.fromarray(pixels).save(path)
            of_class = _named(classes, number, names, settings) if num_classes else {}
            print(strict_json.encode({"image": str(path), "number": number, **of_class}), file=file)
    if grid:
        Image.fromarray(_in_grid(images)).save(output)
        print(strict_json.encode({"image": str(output), "images": len(images)}), file=file)
    return settings.images


def _classes(settings: Prediction, config: Config, num_classes: int, names: Sequence[str]) -> np.ndarray:
    """The class number of each image in turn, int32: those of the settings, or all; empty without classes.

    Raises:
      UsageError: a class does not exist, or a setting has no meaning for the run.
    """
    if not num_classes:
        for name in ("classes", "guidance"):
            if (value := getattr(settings, name)) != getattr(Prediction(run=""), name):
                shown = " ".join(value) if isinstance(value, tuple) else value
                raise UsageError(f"--{name} {shown}: the run in {settings.run} has no classes; leave it out")
        return np.empty(0, np.int32)
    if settings.guidance != 1 and not config.training.drop_label:
        raise UsageError(
            f"--guidance {settings.guidance}: the run in {settings.run} never dropped a label (training.drop_label is "
            "0), so its network cannot draw without one; leave it out"
        )
    known = {name: number for number, name in enumerate(names)}
    if not any(name.isdecimal() for name in names):  # else a number could be meant as a name
        known |= {str(number): number for number in range(num_classes)}
    for name in settings.classes:
        if name not in known:
            some = ", ".join([*names] or map(str, range(num_classes)))
            raise UsageError(f"--classes {name}: the run has no such class; it has {num_classes}: {some:.200}")
    return np.asarray([known[name] for name in settings.classes] or range(num_classes), np.int32)


def _named(classes: np.ndarray, number: int, names: Sequence[str], settings: Prediction) -> dict[str, Any]:
    if settings.guidance == 0:
        return {}
    of_image = int(classes[number % len(classes)])
    return {"class": names[of_image] if names else of_image}


def _prepared(output: str, *, grid: bool) -> pathlib.Path:
    """Creates the folder of the images, with its parents, if absent; of a grid, its folder has to be there."""
    if not output:
        raise UsageError("--output is empty: wanted a folder for the images, or a file such as grid.png for all")
    path = expanded(output)
    if grid and not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}")
    if not grid:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.glob("*.png")):
            raise UsageError(f"--output {output} has images: write another folder, or remove them")
    return path


def _pixels(image: np.ndarray) -> np.ndarray:
    """Scales an image in [-1, 1], float32 [H, W, C], to uint8 in 0..255; without the last axis if it has 1 channel."""
    pixels = np.round(np.clip((image + 1) * 127.5, 0, 255)).astype(np.uint8)
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def _in_grid(images: Sequence[np.ndarray]) -> np.ndarray:
    """Joins images row by row in a grid about as wide as high, a black pixel between them."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    height, width, *channels = images[0].shape
    grid = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, *channels), np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top, left = row * (height + 1), column * (width + 1)
        grid[top : top + height, left : left + width] = image
    return grid
