"""Prepared tensorflow-datasets sets: find one on disk, check that it can serve, and read it without TensorFlow."""

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.contract import require_examples
from mpjax.data.examples import Example, Source
from mpjax.errors import UsageError


_FORMAT = "array_record"


@dataclasses.dataclass(frozen=True)
class PreparedExamples:
    """One split on disk; uint8 images stay encoded, so that they can be decoded at the size that is wanted."""

    records: Sequence[bytes]
    parse: Callable[[bytes], dict[str, Any]]
    image: str
    label: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        return self._example(self.records[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self._example(record) for record in self.records.__getitems__(indices)]  # type: ignore[attr-defined]

    def _example(self, record: bytes) -> Example:
        fields = self.parse(record)
        return {"image": fields[self.image], "label": fields[self.label]}


def prepared_names(data_dir: pathlib.Path) -> list[str]:
    """The sets below `data_dir`, as `name/version` or `name/config/version`, oldest version first."""
    levels = ("*/*", "*/*/*")  # no deeper: there may be folders of a million images
    found = [info.parent.relative_to(data_dir) for at in levels for info in data_dir.glob(f"{at}/dataset_info.json")]
    # A process killed between writing and renaming leaves a folder called incomplete.XXXXXX_version.
    whole = [path for path in found if not path.name.startswith("incomplete.")]
    return [path.as_posix() for path in sorted(whole, key=lambda path: (path.parts[:-1], _version(path.name)))]


def open_prepared(config: Data, data_dir: pathlib.Path) -> Source:
    """Opens the newest version of the set that `config.name` names, or the version that it ends in.

    Raises:
      UsageError: it is not below `data_dir`, is not in array_record files, has no image and label, or has no such
        split; the message says how to get there.
    """
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(_folder(config.name, data_dir))
    if builder.info.file_format is None or builder.info.file_format.value != _FORMAT:
        stored = "an unknown format" if builder.info.file_format is None else builder.info.file_format.value
        raise UsageError(
            f"data set '{config.name}' in {builder.data_dir} is stored as {stored}; wanted {_FORMAT}, which is read "
            "without TensorFlow; where TensorFlow is installed, write\n"
            f"  tfds convert_format --dataset_version_dir {builder.data_dir} --out_file_format {_FORMAT} "
            "--out_dir NEW_DATA_DIR"
        )
    image, label = _image_and_label(builder)
    features: Any = tfds.features.FeaturesDict({key: builder.info.features[key] for key in (image, label)})
    # mpjax decodes images itself: tfds decodes with OpenCV where it finds it, to other pixels than with Pillow.
    encoded = isinstance(features[image], tfds.features.Image) and features[image].np_dtype == np.uint8
    decoders = {image: tfds.decode.SkipDecoding()} if encoded else None

    def parse(record: bytes) -> dict[str, Any]:
        return features.deserialize_example_np(record, decoders=decoders)

    height, width, channels = features[image].shape
    return Source(
        name=config.name,
        num_classes=features[label].num_classes,
        image_shape=(height, width, channels or 3),
        train=PreparedExamples(_records(builder, config.train_split), parse, image, label),
        test=PreparedExamples(_records(builder, config.test_split), parse, image, label),
    )


def _folder(name: str, data_dir: pathlib.Path) -> pathlib.Path:
    prepared = prepared_names(data_dir)
    matching = [known for known in prepared if name in (known, known.rpartition("/")[0])]
    if matching:
        return data_dir / matching[-1]
    sets = sorted({known.rpartition("/")[0] for known in prepared} | {"digits"})
    name = re.sub(r"/[\d.]+$", "", name)
    configs = [known for known in sets if known.startswith(f"{name}/")]
    near = configs or difflib.get_close_matches(name, sets, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"data set '{name}' is not prepared: looked for {data_dir / name}/VERSION/dataset_info.json; {advice}"
        f"prepared there: {', '.join(prepared) or 'none'}; always there: digits, synthetic:32x32x3:10.\n"
        "To prepare it, on a machine with network:\n"
        f"  pip install tensorflow tensorflow-datasets && tfds build {name} --file_format={_FORMAT} --data_dir DIR\n"
        f"then copy DIR/{name} to {data_dir / name}, or write --data.data_dir DIR"
    )


def _image_and_label(builder: Any) -> tuple[str, str]:
    """The names of the two features that make an example."""
    import tensorflow_datasets as tfds

    features = builder.info.features
    keys = builder.info.supervised_keys
    image, label = keys if isinstance(keys, tuple) and len(keys) == 2 else ("image", "label")
    flat: Any = features if isinstance(features, tfds.features.FeaturesDict) else {}
    if (
        {image, label} <= set(flat)
        and isinstance(flat[image], (tfds.features.Image, tfds.features.Tensor))
        and len(flat[image].shape) == 3
        and isinstance(flat[label], tfds.features.ClassLabel)
    ):
        return image, label
    shown = ", ".join(f"{key}: {feature!r}" for key, feature in sorted(flat.items())) or repr(features)
    raise UsageError(
        f"data set '{builder.info.full_name}' has no image with a class label; its features are {shown}; "
        "wanted 'image', an Image or a Tensor [H, W, C], and 'label', a ClassLabel (or supervised_keys naming them)"
    )


def _records(builder: Any, split: str) -> Sequence[bytes]:
    """The serialized examples of a split, in tfds's notation."""
    import tensorflow_datasets as tfds

    try:
        info = builder.info.splits[split]
    except ValueError as error:
        raise UsageError(
            f"split '{split}' of '{builder.info.full_name}': {error}; it has "
            + ", ".join(f"{name} ({info.num_examples} examples)" for name, info in builder.info.splits.items())
            + "; parts are written as in 'train[:90%]'"
        ) from error
    require_examples(split, info.num_examples)
    paths = [pathlib.Path(instruction.filename) for instruction in info.file_instructions]
    if missing := [path.name for path in paths if not path.exists()]:
        raise UsageError(
            f"data set '{builder.info.full_name}': files of split '{split}' are missing: {', '.join(missing)}; "
            f"wanted them in {builder.data_dir}; copy the whole folder again"
        )
    return builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
