"""Predicts with a checkpoint for images, texts, rows or a split: writes JSON lines and masks."""

import collections
import contextlib
import io
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import jax
import numpy as np
from PIL import Image

from mpjax import strict_json
from mpjax.commands.evaluate import open_to_predict, stored_settings, tell_notes, trained_state
from mpjax.commands.prediction_records import Record, record_of
from mpjax.config.commands import FROM_FILES, Prediction
from mpjax.config.paths import expanded
from mpjax.config.schema import Config
from mpjax.config.tasks import CHATS
from mpjax.data.example_reader import batch_fields
from mpjax.data.examples import Source
from mpjax.data.given import Inputs, given_batches, given_images, given_split, takes_images
from mpjax.errors import DataWarning, UsageError, printable
from mpjax.files import replacing
from mpjax.training.eval_step import BATCHES_AHEAD
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh, put_on_devices
from mpjax.training.predict_step import make_predict_step, outputs_for
from mpjax.training.setup import check_fit


def predict_run(settings: Prediction) -> int:
    """Predicts with a checkpoint, writes a JSON line for each input in order, and returns the number of lines.

    The lines go to the file `settings.output`, or to stdout if it is empty. For segmentation, `settings.output` is a
    folder: the predicted masks are written there as PNG, and the lines, with their paths, go to stdout. So do images
    that are drawn.

    Raises:
      UsageError: there is no such run, checkpoint, input or split, the task is the user's own, an input cannot be read
        (with `settings.skip_bad`: none can be), an output of the model is not finite, or, for masks, no folder is set.
      OSError: the output cannot be written.
    """
    settings.check()
    config = None if settings.run.startswith(FROM_FILES) else stored_settings(settings)
    if _transcribes(settings, config):
        from mpjax.commands.transcription import transcribe  # local, because most runs have no sounds

        with _lines(settings.output) as file:
            return transcribe(settings, config, file)
    if config is None or settings.continues:
        from mpjax.commands.generation import continue_texts  # local, because most runs have no texts

        with _lines(settings.output) as file:
            return continue_texts(settings, config, file)
    if settings.images:
        from mpjax.commands.drawn_images import draw_images  # local, because most runs draw no images

        return draw_images(settings, config, sys.stdout)
    if config.task == "diffusion":
        raise UsageError(f"the run in {settings.run} is for diffusion, which draws: write --images N --output FOLDER")
    if config.task == "own":
        raise UsageError(
            f"the run in {settings.run} has a task of its own (--task own): only its objective can read it"
        )
    plan, source, task = open_to_predict(settings, config)
    if config.training.objective:  # its model must have the outputs of the task
        fields = batch_fields(source, config.data)
        check_fit(task.abstract, config.task, fields, name=str(config.model.name), dtype=plan.policy.compute_dtype)
    if settings.split:
        tell_notes(source, config)
    inputs = _given(settings, config, source)
    segments = config.task == "segmentation"
    masks = folder_of_masks(settings, inputs) if segments else None
    values = mask_values(source) if segments else np.empty(0)
    layout = Layout(make_mesh())
    _, state, _ = trained_state(
        task, config, source, pathlib.Path(settings.run), settings.checkpoint, layout, ema=settings.ema
    )
    params = state.averaged if settings.ema else state.params

    prepare, policy = task.objective.prepare, plan.module_policy
    outputs_of = outputs_for(config.task, prepare, policy, top=settings.top, beta=config.training.beta)
    step = make_predict_step(task.structure, outputs_of, cast=task.cast, layout=layout)
    batch_size = settings.batch_size or config.data.tested
    sharding = layout.evaluation(batch_size)

    with _lines(None if masks else settings.output) as file, _progress(settings, len(inputs.names)) as at:
        skip = (lambda message: print(printable(f"skipped: {message}"), file=sys.stderr)) if settings.skip_bad else None
        batches = given_batches(inputs, batch_size, workers=config.data.workers, skip=skip)

        def computed() -> Iterator[tuple[np.ndarray, Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]:
            """Yields inputs, batches and outputs; later batches are read while the device computes."""
            running: collections.deque = collections.deque()
            for batch in batches:
                running.append((*batch, step(params, state.stats, put_on_devices(batch.arrays, sharding))))
                while len(running) >= BATCHES_AHEAD:
                    yield jax.device_get(running.popleft())
            while running:
                yield jax.device_get(running.popleft())

        count = 0
        for owner, rows in _by_input(computed()):
            record: Record = {"input": inputs.names[owner]}
            if not all(row["finite"] for row in rows):
                raise UsageError(
                    f"{inputs.names[owner]}: the model's output is not finite under {plan.policy}; "
                    "write --policy float32, or another --checkpoint"
                )
            if masks and inputs.mask:
                record["mask"] = str(masks / _mask_name(inputs.names[owner]))
                mask = inputs.mask(inputs.load([owner])[0], [row["mask"] for row in rows])
                Image.fromarray(values[mask]).save(record["mask"])
            else:
                record |= record_of(config.task, rows, source.fields)
            print(strict_json.encode(record), file=file)
            count += 1
            at(owner + 1)
    if not count:
        raise UsageError(f"none of {len(inputs.names)} inputs could be read, see above")
    return count


def _transcribes(settings: Prediction, config: Config | None) -> bool:
    """True if the texts of sounds are to be written, by a run or by a model of `hf:FOLDER`."""
    if config is not None:
        return config.task == "transcription" and (settings.continues or bool(settings.inputs))
    from mpjax.commands.model_of_files import folder_of  # local, because most predictions are of runs
    from mpjax.models.folder_kinds import kind_of

    return kind_of(folder_of(settings)) == "whisper"


def _given(settings: Prediction, config: Config, source: Source) -> Inputs:
    if settings.split:
        return given_split(source, config.data)
    if config.data.preprocess:
        raise UsageError(
            f"{settings.inputs[0]}: the run's function --data.preprocess {config.data.preprocess} takes examples of "
            "its data set, and not files alone; write --split"
        )
    if config.task in CHATS:
        raise UsageError(
            f"{settings.inputs[0]}: the run is for {config.task}, and a file of texts does not tell which are answers; "
            "write --split for those of its data set, or --prompt or --generate for new ones"
        )
    if config.task == "text_to_text":
        raise UsageError(
            f"{settings.inputs[0]}: the run is for text_to_text, and a file of texts has no targets to compare with: "
            "write --split for the loss of its data set, or --prompt or --generate for the targets of new texts"
        )
    if "row" in source.fields:
        from mpjax.data.tabular_inputs import given_rows  # local, because images need no cells

        assert source.encoding is not None, "rows have an encoding"
        return given_rows(settings.inputs, source.encoding, config.data)
    if "sound" in source.fields:
        from mpjax.data.audio.given import given_sounds  # local, because few runs have sounds

        return given_sounds(settings.inputs, config.data)
    if takes_images(source):
        return given_images(settings.inputs, source, config.data)
    from mpjax.data.text.given import given_texts, require_tables  # local, because images need no tokenizer
    from mpjax.data.text.template import Template

    template, usual = config.data.text_template, Prediction(run="").column
    if template and settings.column != usual:
        raise UsageError(
            f"--column {settings.column}: the run makes a text of columns, by --data.text_template '{template}'; leave "
            "it out"
        )
    if settings.column != usual:
        require_tables(settings.inputs, settings.column)
    columns = Template.parse(template) if template else Template.alone(settings.column)
    return given_texts(settings.inputs, source, config.data, columns=columns)


_KNOWN = ("label", "target", "labels")
"""The fields of what is predicted, which the examples of a split have."""


def _by_input(computed: Iterator) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Groups the outputs of batches by input: yields each input's number, and a dict of outputs for each of its rows.

    A long text or an image in tiles has several consecutive rows, which may be in different batches. If a batch has
    one of the fields `_KNOWN`, each dict has it too.
    """
    current, rows = -1, []
    for owners, batch, outputs in computed:
        for place_in_batch, owner in enumerate(owners):
            if owner != current and rows:
                yield current, rows
                rows = []
            current = int(owner)
            row = {name: values[place_in_batch] for name, values in outputs.items()}
            rows.append(row | {name: batch[name][place_in_batch] for name in _KNOWN if name in batch})
    if rows:
        yield current, rows


def folder_of_masks(settings: Prediction, inputs: Inputs) -> pathlib.Path:
    """Creates the folder `settings.output` for the masks, with its parents, if absent, and returns it.

    Raises:
      UsageError: no folder is set, or two inputs would have the same mask file.
    """
    if not settings.output:
        raise UsageError("--output is empty: wanted a folder for the masks, such as --output masks")
    owners: dict[str, str] = {}
    for name in inputs.names:
        if (mask := _mask_name(name)) in owners:
            raise UsageError(f"{owners[mask]} and {name}: both masks would be {mask}; predict one folder at a time")
        owners[mask] = name
    folder = expanded(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _mask_name(name: str) -> str:
    """The name of an input's mask: `cat.png` for the file `photos/cat.jpg`, `test[3].png` for the example `test[3]`."""
    return f"{name if name.endswith(']') else pathlib.PurePath(name).stem}.png"


def mask_values(source: Source) -> np.ndarray:
    """The value of each class in the masks of a data set, by class number: uint8, or uint16 if a value needs it.

    Warns:
      DataWarning: a value is negative or above 65,535, which PNG cannot store. Then all values are the class numbers.
    """
    field: Any = source.fields["mask"]
    values = np.asarray(field.values or range(field.num_classes))
    if values.min() >= 0 and values.max() < 2**16:
        return values.astype(np.min_scalar_type(values.max()))
    warnings.warn(
        f"mask: the stored values go from {values.min()} to {values.max()}, which no PNG can hold: class numbers are "
        "written instead",
        DataWarning,
        stacklevel=2,
    )
    return np.arange(field.num_classes, dtype=np.uint8)


@contextlib.contextmanager
def _lines(output: str | None) -> Iterator[TextIO]:
    """Context that yields the text stream of the lines: a file at `output`, or stdout if `output` is empty or None.

    A regular file is replaced when the block ends, and stays as it was if the block raises. If the path is stdout or
    stderr itself, such as /dev/stdout or the file of a redirection, the stream is yielded.

    Raises:
      UsageError: the folder of the file does not exist.
    """
    if not output:
        yield sys.stdout
        return
    path = expanded(output)
    if stream := next((stream for stream in (sys.stdout, sys.stderr) if stream and _is_open(path, stream)), None):
        yield stream
        return
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}")
    is_device = path.exists() and not path.is_file()
    with open(path, "wb") if is_device else replacing(path.resolve()) as file:
        lines = io.TextIOWrapper(file, "utf-8")
        try:
            yield lines
        finally:
            lines.detach()  # flushes the rest, and leaves the file open


def _is_open(path: pathlib.Path, stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):  # no such file; a stream that is closed or no file
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    return False


@contextlib.contextmanager
def _progress(settings: Prediction, total: int) -> Iterator[Callable[[int], None]]:
    """Context that yields a function that is called with the number of finished inputs and shows progress on stderr.

    It prints about 100 times in all. It does nothing if stderr is no terminal, or if the lines of the result appear in
    the terminal too.
    """
    if not sys.stderr.isatty() or (sys.stdout.isatty() and not settings.output):
        yield lambda done: None
        return
    step = max(math.ceil(total / 100), 1)

    def at(done: int) -> None:
        if done % step == 0 or done == total:
            print(f"\r{done:,}/{total:,}", end="", file=sys.stderr, flush=True)

    try:
        yield at
    finally:
        print(file=sys.stderr)
