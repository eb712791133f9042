"""Opens a folder of sounds: with a table of their texts, or with one folder for each class."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.config.tasks import TaskName
from mpjax.config.unread import written
from mpjax.data.audio.feature_settings import FeatureSettings, read_features
from mpjax.data.audio.sound_files import SOUND, SoundFiles, notes_on
from mpjax.data.audio.sounds import Sound
from mpjax.data.audio.transcripts import Transcriber
from mpjax.data.audio.waveforms import ENDINGS, require_packages
from mpjax.data.examples import Source
from mpjax.data.fields import Field, Label
from mpjax.data.sources.files_by_class import FileKind, class_folders, split_folders, spread
from mpjax.data.sources.metadata import FILE_NAME, NAMES, metadata_in, read_metadata, told_without_row
from mpjax.data.table import base_names, parts_of
from mpjax.errors import AbsentData, UsageError


SOUNDS = FileKind("sounds", "a wav or flac file", ENDINGS, NAMES)
_TEXTS = ("text", "transcription", "transcript", "sentence")
_UNREAD = ("preprocess", "text_template", "ignore_index", "num_classes", "header", "mix", "augment")


class Files(NamedTuple):
    """The files of a split in the order of its examples, with their texts or the numbers of their classes."""

    paths: list[str]
    values: Sequence[Any]


def open_sounds(config: Data, task: TaskName) -> Source:
    """Opens a folder of wav and flac files for transcription or classification.

    For transcription, `PATH/SPLIT/metadata.csv` or `metadata.jsonl` has a row for each file, with `file_name`, its path
    below that folder, and its text. For classification, files are `PATH/SPLIT/CLASS/*.wav`. Without split folders,
    PATH is one split, `train`, and the settings select parts of it. The examples of a split are ordered by a hash of
    their file names. The headers of all files are read now, and the samples when an example is.

    Raises:
      UsageError: the data are of another kind, the folder, a split or a file does not exist, a file is damaged, empty
        or too long, a table has no texts, or a setting has no meaning for sounds.
    """
    kind, _, where = str(config.name).partition(":")
    if kind != "folder":
        raise UsageError(
            f"--data.name {config.name} with --task {task}: wanted a folder of wav or flac files, --data.name "
            "folder:PATH"
        )
    for flag in written(config, _UNREAD):
        raise UsageError(f"{flag} has no meaning for a folder of sounds: leave it out")
    require_packages()
    root, settings = expanded(where), read_features(config.features)
    if not root.is_dir():
        raise AbsentData(
            f"data set 'folder:{where}': there is no folder {root.absolute()}; wanted one of wav or flac files"
        )
    return (_with_texts if task == "transcription" else _with_classes)(root, config, settings)


def _with_texts(root: pathlib.Path, config: Data, settings: FeatureSettings) -> Source:
    set_name, names = str(config.name), [*base_names(config.train_split), *base_names(config.test_split)]
    notes: list[str] = []
    folders = {"train": root}
    if metadata_in(root) is None:
        folders = split_folders(root, list(dict.fromkeys(names)), set_name, of_files=True)
    splits = {name: _texts_of(folder, name, config, notes) for name, folder in folders.items()}
    transcriber = Transcriber(config)

    def arrays(texts: Sequence[str], split: str) -> dict[str, np.ndarray]:
        return transcriber.encoded(texts, split, notes)

    return _source(splits, arrays, transcriber.fields, config, settings, notes)


def _texts_of(folder: pathlib.Path, split: str, config: Data, notes: list[str]) -> Files:
    """Reads the table of a split. Rows without a text are left out; `notes` get a sentence."""
    table = metadata_in(folder)
    if table is None:
        raise UsageError(
            f"there is no {NAMES[0]} and no {NAMES[1]} in {folder}: wanted a table with {FILE_NAME} and text of each "
            "sound; for folders of classes write --task audio_classification"
        )
    rows = read_metadata(table)
    known = {name: None for row in rows for name in row if name != FILE_NAME}
    wanted = config.columns.get("text", "")
    if set(config.columns) - {"text"}:
        raise UsageError(f"--data.columns {' '.join(config.columns)}: sounds have the field text alone")
    column = wanted or next((name for name in _TEXTS if name in known), "")
    if column not in known:
        raise UsageError(
            f"{table} has no column {wanted or ' or '.join(_TEXTS)}; it has {', '.join(known) or 'none'} beside "
            f"{FILE_NAME}; write --data.columns text NAME"
        )
    texts = {row[FILE_NAME]: row.get(column, "") for row in rows}
    paths = {name: str(folder / name) for name in texts}
    if missing := [name for name in texts if not pathlib.Path(paths[name]).is_file()]:
        raise UsageError(
            f"{table}: there is no {paths[missing[0]]} ({len(missing):,} of {len(texts):,} files are missing)"
        )
    if other := [name for name in texts if not name.lower().endswith(ENDINGS)]:
        raise UsageError(f"{paths[other[0]]}: wanted {' or '.join(ENDINGS)}; convert it")
    notes += told_without_row(table, len(texts), SOUNDS, split)
    kept = sorted((name for name, text in texts.items() if text.strip()), key=spread)
    if len(kept) < len(texts):
        notes.append(f"{split}: {len(texts) - len(kept):,} of {len(texts):,} sounds have no text and are left out")
    if not kept:
        raise UsageError(f"{table}: no row has a text in the column {column}")
    return Files([paths[name] for name in kept], [texts[name] for name in kept])


def _with_classes(root: pathlib.Path, config: Data, settings: FeatureSettings) -> Source:
    set_name, names = str(config.name), [*base_names(config.train_split), *base_names(config.test_split)]
    if config.columns:
        raise UsageError("--data.columns has no meaning for folders of classes: leave it out")
    folders = split_folders(root, list(dict.fromkeys(names)), set_name)
    found, classes = class_folders(folders, set_name, SOUNDS)
    splits = {name: Files(*listing) for name, listing in found.items()}

    def arrays(numbers: Sequence[int], split: str) -> dict[str, np.ndarray]:
        del split
        return {"label": np.asarray(numbers, np.int32)}

    return _source(splits, arrays, {"label": Label(len(classes), names=classes)}, config, settings, [])


def _source(
    splits: dict[str, Files],
    arrays: Any,
    fields: dict[str, Field],
    config: Data,
    settings: FeatureSettings,
    notes: list,
) -> Source:
    set_name = str(config.name)
    sizes = {name: len(files.paths) for name, files in splits.items()}
    parts = []
    for expression in (config.train_split, config.test_split):
        ranges = [(splits[part.split], slice(part.start, part.stop)) for part in parts_of(expression, sizes, set_name)]
        paths = [path for files, rows in ranges for path in files.paths[rows]]
        values = [value for files, rows in ranges for value in files.values[rows]]
        notes += notes_on(paths, expression, settings)
        parts.append(SoundFiles(paths, arrays(values, expression), settings))
    sound: dict[str, Field] = {SOUND: Sound(settings.frames, settings.bins)}
    return Source(set_name, sound | fields, *parts, notes=tuple(dict.fromkeys(notes)), places=parts[1].paths)
