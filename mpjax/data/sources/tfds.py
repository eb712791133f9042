"""Finds prepared tensorflow-datasets sets on disk, checks them, and reads them without TensorFlow."""

import contextlib
import dataclasses
import difflib
import json
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.choices import GENERATED
from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.examples import Example
from mpjax.data.fields import Image, Label, Mask
from mpjax.data.images.depth import EIGHT, SIXTEEN
from mpjax.data.sources.formats import BY_FUNCTION, has_tars, is_readable
from mpjax.data.table import Column, Other, Table, Text, require_ordered_parts
from mpjax.errors import UsageError, first_line, is_exhausted


_FORMAT = "array_record"
_DESCRIPTION = ("dataset_info.json", "features.json")
_AT_ONCE = 1000


@dataclasses.dataclass(frozen=True)
class PreparedExamples:
    """The examples of one split on disk. Images of uint8 or uint16 stay encoded bytes; mpjax decodes them later.

    A damaged file is a UsageError when an example is read.

    Args:
      records: the serialized examples, read from disk on access.
      parse: a function from a serialized example to its columns.
      folder: the folder of the set.
    """

    records: Sequence[bytes]
    parse: Callable[[bytes], Example]
    folder: pathlib.Path

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        with _damage_told(self.folder):
            return [self.parse(record) for record in self.records.__getitems__(indices)]  # type: ignore[attr-defined]


def prepared_names(data_dir: pathlib.Path) -> list[str]:
    """Lists the prepared sets below `data_dir` as `name/version` or `name/config/version`.

    They are sorted by name, and the versions of a set by number, the oldest first. Incomplete sets are left out.
    """
    levels = ("*/*", "*/*/*")  # no deeper: a folder may hold a million images
    paths = [info.parent.relative_to(data_dir) for at in levels for info in data_dir.glob(f"{at}/dataset_info.json")]
    # A process killed between writing and renaming leaves a folder called incomplete.XXXXXX_version.
    whole = [path for path in paths if not path.name.startswith("incomplete.")]
    return [path.as_posix() for path in sorted(whole, key=lambda path: (path.parts[:-1], _version(path.name)))]


@contextlib.contextmanager
def _damage_told(folder: pathlib.Path) -> Iterator[None]:
    """Context manager that converts errors, inside its `with` block, to a UsageError that names the damaged file.

    UsageErrors and errors of an exhausted machine pass unchanged. Only after an error are the files of the prepared set
    in `folder` read, up to the first damaged one. If all can be read, the message names the two files that describe the
    set, and the original error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or is_exhausted(error):
            raise
        file, fault = next(_damaged_files(folder), (f"{folder}/{' or '.join(_DESCRIPTION)}", first_line(error)))
        raise UsageError(f"{file} is damaged ({fault}); {_repair(folder)}") from error


def _repair(folder: pathlib.Path) -> str:
    is_generated = not {folder.parent.name, folder.parent.parent.name}.isdisjoint(GENERATED)
    return f"delete {folder}, " + ("which is written again" if is_generated else "and copy or prepare it again")


def _damaged_files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Yields each unreadable file of a prepared set, and the error in words. It reads every file completely."""
    from array_record.python.array_record_module import ArrayRecordReader

    records = (file for file in folder.iterdir() if f".{_FORMAT}-" in file.name)
    for file in [*(folder / name for name in _DESCRIPTION), *sorted(records)]:
        try:
            if file.name in _DESCRIPTION:
                _object_in(file)
                continue
            reader = ArrayRecordReader(str(file))
            reader.read([0])
            for start in range(0, reader.num_records(), _AT_ONCE):
                reader.read(start, min(start + _AT_ONCE, reader.num_records()))
        except Exception as error:
            if is_exhausted(error):
                raise
            yield file, first_line(error)


def _object_in(file: pathlib.Path) -> Mapping[str, Any]:
    """Reads the JSON object in a file as a dict.

    Raises:
      ValueError: the file is no valid JSON, or holds something other than an object.
      OSError: the file cannot be read.
    """
    try:
        content = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"wanted a JSON object, got {type(content).__name__}")
    return content


def _require_features_of_tfds(folder: pathlib.Path) -> None:
    """Raises UsageError if the features.json of a prepared set names classes outside tensorflow_datasets.

    tensorflow-datasets would import and run them. A set without the file passes. Raises ValueError if the file holds no
    JSON object, and OSError if it cannot be read.
    """
    file = folder / "features.json"
    classes = list(_classes_in(_object_in(file))) if file.exists() else []
    if others := [name for name in classes if not name.startswith("tensorflow_datasets.")]:
        raise UsageError(f"{file} names the class {others[0]!r}: wanted features of tensorflow_datasets alone")


def _classes_in(described: Any) -> Iterator[str]:
    if isinstance(described, list):
        described = dict(enumerate(described))
    for key, value in described.items() if isinstance(described, dict) else ():
        if key in ("pythonClassName", "python_class_name", "type") and isinstance(value, str) and "." in value:
            yield value
        yield from _classes_in(value)


def open_prepared(config: Data, data_dir: pathlib.Path) -> Table:
    """Opens the newest prepared version of the set `config.name`, or the version at the end of the name.

    Only the description of the set is read; examples are read later, without TensorFlow.

    Raises:
      UsageError: the set is not below `data_dir` (the message explains how to prepare it), is damaged, names features
        of other packages, or is not stored as array_record files. Splits are checked when columns are opened.
    """
    import tensorflow_datasets as tfds

    folder = _folder(str(config.name), data_dir)
    with _damage_told(folder):
        _require_features_of_tfds(folder)
        builder: Any = tfds.builder_from_directory(folder)
        columns, preferred = _columns_of(builder.info)
    if builder.info.file_format is None or builder.info.file_format.value != _FORMAT:
        stored = "an unknown format" if builder.info.file_format is None else builder.info.file_format.value
        raise UsageError(
            f"data set '{config.name}' in {builder.data_dir} is stored as {stored}; wanted {_FORMAT}, which is read "
            "without TensorFlow; where TensorFlow is installed, write\n"
            f"  tfds convert_format --dataset_version_dir {builder.data_dir} --out_file_format {_FORMAT} "
            "--out_dir NEW_DATA_DIR"
        )
    features: Any = builder.info.features if isinstance(builder.info.features, tfds.features.FeaturesDict) else {}

    def open_columns(names: Sequence[str]) -> tuple[PreparedExamples, PreparedExamples]:
        parse = _parser({name: features[name] for name in names})
        splits = (config.train_split, config.test_split)
        with _damage_told(folder):
            train, test = (PreparedExamples(_records(builder, split), parse, folder) for split in splits)
        return train, test

    return Table(str(config.name), columns, open_columns, preferred)


def _columns_of(info: Any) -> tuple[dict[str, Column], dict[str, str]]:
    """Finds the type of each column of a set, and the columns that it declares for the fields of a task.

    The latter map `image` and `text` to the input of the set's `supervised_keys`, and `label` and `mask` to the target;
    the dict is empty if the set declares no pair of columns.
    """
    import tensorflow_datasets as tfds

    from mpjax.data.sources import digits

    keys: Any = info.supervised_keys
    is_pair = isinstance(keys, tuple) and len(keys) == 2 and all(isinstance(key, str) for key in keys)
    image_or_text, label = keys if is_pair else ("", "")
    preferred = {"image": image_or_text, "text": image_or_text, "label": label, "mask": label}
    classes = digits.CANVAS_CLASSES if info.name == digits.DigitsCanvas.name else 0
    features: Any = info.features if isinstance(info.features, tfds.features.FeaturesDict) else {}
    return {name: column_of(feature, classes) for name, feature in features.items()}, preferred if is_pair else {}


def column_of(feature: Any, classes: int = 0) -> Column:
    """Converts a tensorflow-datasets feature to the type of a column.

    Labels and masks need a known number of classes; a plain tensor of integers with two axes is a mask too. Images and
    plain tensors with three axes are images; encoded uint16 images of one channel have 16 bits. A feature of any other
    kind becomes `Other`.

    Args:
      feature: the feature.
      classes: the number of classes of a mask stored as a plain tensor, which has no record of it; 0 if unknown.
    """
    import tensorflow_datasets as tfds

    kinds = tfds.features
    if isinstance(feature, kinds.ClassLabel) and feature.num_classes:
        return Label(feature.num_classes, names=tuple(feature.names))
    if isinstance(feature, kinds.Text):
        return Text()
    shape: Any = getattr(feature, "shape", ())
    if isinstance(feature, kinds.LabeledImage) and feature.num_classes:
        return Mask((shape[0], shape[1]), feature.num_classes)
    if isinstance(feature, (kinds.Image, kinds.Tensor)) and len(shape) == 3:
        height, width, channels = shape
        encoded = isinstance(feature, kinds.Image) and feature.np_dtype == np.uint16 and channels == 1
        return Image((height, width, channels or 3), depth=SIXTEEN if encoded else EIGHT)
    dtype: Any = getattr(feature, "np_dtype", None)
    if isinstance(feature, kinds.Tensor) and len(shape) == 2 and np.issubdtype(dtype, np.integer):
        return Mask((shape[0], shape[1]), classes)
    return Other(repr(feature), len(shape) if isinstance(shape, tuple) else None)


def _parser(features: dict[str, Any]) -> Callable[[bytes], Example]:
    import tensorflow_datasets as tfds

    spec: Any = tfds.features.FeaturesDict(features)
    # mpjax decodes images itself: tfds uses OpenCV if it is installed, and OpenCV's pixels differ from Pillow's.
    encoded = [
        n for n, f in features.items() if isinstance(f, tfds.features.Image) and f.np_dtype in (np.uint8, np.uint16)
    ]
    decoders = {name: tfds.decode.SkipDecoding() for name in encoded} or None
    return lambda record: spec.deserialize_example_np(record, decoders=decoders)


def _folder(name: str, data_dir: pathlib.Path) -> pathlib.Path:
    prepared = prepared_names(data_dir)
    matching = [known for known in prepared if name in (known, known.rpartition("/")[0])]
    if matching:
        return data_dir / matching[-1]
    if (path := expanded(name)).exists():
        # A folder without folders holds files of Hugging Face's formats, not classes of images.
        tars = has_tars(path)
        has_folders = path.is_dir() and any(inside.is_dir() for inside in path.iterdir())
        is_known = tars or has_folders or is_readable(path)
        there = f"{'webdataset' if tars else 'folder' if has_folders else 'hf'}:{name}"
        raise UsageError(
            f"data set '{name}' is not a name of tensorflow-datasets, but there is a "
            f"{'folder' if path.is_dir() else 'file'} {path}; "
            + (f"write --data.name {there}" if is_known else BY_FUNCTION),
            repair={"data.name": there} if is_known else {},
        )
    sets = sorted({known.rpartition("/")[0] for known in prepared} | set(GENERATED))
    name = re.sub(r"/[\d.]+$", "", name)
    configs = [known for known in sets if known.startswith(f"{name}/")]
    near = configs or difflib.get_close_matches(name, sets, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"data set '{name}' is not prepared: looked for {data_dir / name}/VERSION/dataset_info.json; {advice}"
        f"prepared there: {', '.join(prepared) or 'none'}; always available: {', '.join(GENERATED)}, "
        f"synthetic:32x32x3:10; others: folder:PATH, FILE.npz, hf:PATH, hf:OWNER/NAME, webdataset:PATH.\n"
        "To prepare it, on a machine with network:\n"
        "  pip install tensorflow tensorflow-datasets && "
        f"tfds build {shlex.quote(name)} --file_format={_FORMAT} --data_dir DIR\n"
        f"then copy DIR/{name} to {data_dir / name}, or write --data.data_dir DIR"
    )


def _records(builder: Any, split: str) -> Sequence[bytes]:
    """Opens the serialized examples of a split, given in the notation of tfds, such as `train[:90%]`.

    Raises:
      UsageError: the split does not exist, a part of it ends before it starts, one of its files is missing, or has
        another number of examples than the description of the set says.
    """
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        info = builder.info.splits[split]
    except ValueError as error:
        raise UsageError(
            f"split '{split}' of '{builder.info.full_name}': {error}; it has "
            + ", ".join(f"{name} ({info.num_examples} examples)" for name, info in builder.info.splits.items())
            + "; parts are written as in 'train[:90%]'"
        ) from error
    require_ordered_parts(split, builder.info.splits)
    paths = [pathlib.Path(instruction.filename) for instruction in info.file_instructions]
    if missing := [path.name for path in paths if not path.exists()]:
        raise UsageError(
            f"data set '{builder.info.full_name}': files of split '{split}' are missing: {', '.join(missing)}; "
            f"wanted them in {builder.data_dir}; copy the whole folder again"
        )
    for path, instruction in zip(paths, info.file_instructions, strict=True):
        # Of a file cut at a multiple of 64 KiB, the reader finds no records, and reads each as None.
        if (count := ArrayRecordReader(str(path)).num_records()) != (stated := instruction.examples_in_shard):
            raise UsageError(
                f"{path} has {count} examples, and dataset_info.json says {stated}: one of them is damaged; "
                f"{_repair(path.parent)}"
            )
    return builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
