"""Describes the fields of a run's data as JSON, and makes fields of it, so that a model predicts without its data."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data import fields as plain
from mpjax.data.example_reader import trained_dtypes
from mpjax.data.examples import NO_EXAMPLES, Source
from mpjax.data.fields import Field
from mpjax.data.images.depth import Depth


if TYPE_CHECKING:  # few runs have statistics of their columns
    from mpjax.data.encoding import Encoding


Described = Mapping[str, Mapping[str, Any]]
"""By field: its `kind`, the name of its class, and the attributes of that class; of images also their `trained_dtype`.

A field of a class that is not mpjax's own has no `kind`.
"""


def described_fields(source: Source, config: Data) -> Described:
    """Describes the fields of a set by values of JSON. Training examples are read for the dtype of images."""
    dtypes = trained_dtypes(source, config)
    described: dict[str, dict[str, Any]] = {}
    field: Any
    for name, field in source.fields.items():
        described[name] = {"names": list(names)} if (names := getattr(field, "names", ())) else {}
        if type(field).__module__.partition(".")[0] == __name__.partition(".")[0]:
            values = {part.name: getattr(field, part.name) for part in dataclasses.fields(field)}
            described[name] = {"kind": type(field).__name__, **{key: _as_json(value) for key, value in values.items()}}
        if name in dtypes:
            described[name]["trained_dtype"] = str(dtypes[name])
    return described


def _as_json(value: Any) -> Any:
    if isinstance(value, Depth):
        return [value.name, _as_json(value.bounds)]
    if isinstance(value, tuple | list):
        return [_as_json(element) for element in value]
    if isinstance(value, np.dtype):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def source_without_examples(name: str, described: Described, encoding: "Encoding | None") -> Source | None:
    """Makes a set of described fields, in which no split has examples; None if a field is of a class that is unknown.

    `name` is the data set, for messages; `encoding` has the statistics of its columns.
    """
    try:
        fields = {field: _made(values) for field, values in described.items()}
        dtypes = {
            field: np.dtype(values["trained_dtype"]) for field, values in described.items() if "trained_dtype" in values
        }
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version
        return None
    return Source(name, fields, train=NO_EXAMPLES, test=NO_EXAMPLES, encoding=encoding, trained_dtypes=dtypes)


def _made(values: Mapping[str, Any]) -> Field:
    attributes = {
        key: _as_attribute(key, value) for key, value in values.items() if key not in ("kind", "trained_dtype")
    }
    match values["kind"]:
        case "Row" | "NumericTarget" | "Labels" as kind:
            from mpjax.data import targets  # local, because few runs have them

            return getattr(targets, kind)(**attributes)
        case "Sound":
            from mpjax.data.audio.sounds import Sound

            return Sound(**attributes)
        case "UnitImage":
            from mpjax.data.unit_images import UnitImage

            return UnitImage(**attributes)
        case "Image" | "Label" | "Mask" | "Tokens" | "Length" | "Numbers" as kind:
            return getattr(plain, kind)(**attributes)
        case kind:
            raise KeyError(kind)


def _as_attribute(name: str, value: Any) -> Any:
    if name == "depth":
        kind, bounds = value
        return Depth(kind, None if bounds is None else tuple(bounds))
    if name == "dtype":
        return np.dtype(value)
    return tuple(value) if isinstance(value, list) else value
