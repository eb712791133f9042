"""The fields of an example: the contents, shape and dtype of each on the device.

The fields are the contract between data and model. Images arrive as uint8 or float32. Class numbers, tokens and lengths
arrive as int32, and the numbers of a user's own task as int32, float32 or bool. The step casts images to the compute
dtype of the policy once, and casts nothing else.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.data.images.depth import EIGHT, Depth
from mpjax.errors import UsageError
from mpjax.precision.dtypes import is_floating


class Field(Protocol):
    """A field of an example: its shape, and how its values are checked and cast."""

    @property
    def rank(self) -> int:
        """The number of axes of one example, without the batch axis."""
        ...

    @property
    def origin(self) -> str:
        """The origin of the values, for messages, such as `column 'img'`; empty if the column has the field's name."""
        ...

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks `value`, an example or a batch with any leading axes, and casts it to the batch dtype of the field.

        Args:
          name: the name of the field, for messages.
          value: an array whose last `rank` axes are the axes of one example.

        Returns:
          The array in the batch dtype, of the same shape; it may be `value` itself.

        Raises:
          UsageError: the shape, dtype or a value does not match the field; the message has `name`, the expected values
            and what to write instead.
        """
        ...


Fields = Mapping[str, Field]
"""Maps names to fields: `image`, `label`, `mask`, `tokens` and `length`, the `row`, `target` and `labels` of
`data/targets.py`, or any names for a user's own task."""

PREDICTED = frozenset({"label", "target", "labels"})
"""The names of fields that the outputs of a classifier stand for: logits of classes or of labels, or numbers."""

IGNORED = 255
"""The class number of pixels that the loss and the metrics ignore."""

IGNORED_LABEL = -1
"""The label of examples that the loss and the metrics ignore."""

_LINE = "in the function of --data.preprocess"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromColumn:
    """The base class of all fields: `origin` says, for messages, where the values come from (`Field.origin`)."""

    origin: str = dataclasses.field(default="", compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Image(FromColumn):
    """The field of an image: uint8 in 0..255 stays uint8, floating point becomes float32.

    Args:
      shape: (H, W, C); H or W is None if it differs among the images.
      depth: the bit depth and the range of encoded images. It does not apply to images stored as arrays.
    """

    shape: tuple[int | None, int | None, int]
    depth: Depth = dataclasses.field(default=EIGHT, compare=False, repr=False, kw_only=True)

    @property
    def rank(self) -> int:
        """3, the number of axes of one example: height, width and channels."""
        return 3

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks pixels [..., H, W, C]: uint8 stays uint8, floating point is cast to float32.

        Raises:
          UsageError: the shape does not match, the dtype is neither uint8 nor floating, or a pixel is NaN or infinite
            in float32.
        """
        if not _fits(value.shape, self.shape):
            raise UsageError(
                f"{called(name, self)}: shape {value.shape}; wanted "
                f"{_words(self.shape, 'height', 'width', 'channels')} per example "
                f"(a grayscale image has 1 channel: write {name}[..., None]; images of several sizes need "
                "--data.image_size)"
            )
        if value.dtype == np.uint8:
            return value
        if not is_floating(value):
            raise UsageError(
                f"{called(name, self)}: dtype {value.dtype}; wanted uint8 in 0..255, or floating point scaled as the "
                f"model wants it; write {name}.astype(np.uint8) or {name}.astype(np.float32) / largest_value {_LINE}"
            )
        with np.errstate(over="ignore"):  # a float64 that overflows float32 becomes inf, an error below
            value = value.astype(np.float32, copy=False)
        finite = np.isfinite(value)
        if not finite.all():
            first = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise UsageError(
                f"{called(name, self)}: {value.size - np.count_nonzero(finite)} of {value.size} values are not finite "
                f"in float32, the first at {first}: {value[first]}; wanted finite pixels; repair the data or drop the "
                "example"
            )
        return value


@dataclasses.dataclass(frozen=True)
class Label(FromColumn):
    """The field of a class number, one integer per example.

    Args:
      num_classes: the number of classes; labels are in [0, num_classes).
      names: the name of each class; empty if the data set has none. Fields are equal even if their names differ.
      ignores: True if labels may also be `IGNORED_LABEL` (-1), which the loss and the metrics leave out.
    """

    num_classes: int
    names: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False, kw_only=True)
    ignores: bool = dataclasses.field(default=False, repr=False, kw_only=True)

    @property
    def outputs(self) -> int:
        """The number of outputs of a model: one logit for each class."""
        return self.num_classes

    @property
    def rank(self) -> int:
        """0: a scalar."""
        return 0

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks class numbers of any integer dtype and shape, and casts them to int32.

        Raises:
          UsageError: the dtype is no integer, or a number is outside [0, num_classes) and is not an accepted
            `IGNORED_LABEL`.
        """
        advice = f"write {name}.argmax(-1) for one-hot labels"
        ignored = IGNORED_LABEL if self.ignores else None
        return _class_numbers(self, name, value, self.num_classes, advice, ignored=ignored)


@dataclasses.dataclass(frozen=True)
class Mask(FromColumn):
    """The field of a mask: a class number for each pixel.

    Args:
      shape: (H, W); H or W is None if it differs among the masks.
      num_classes: the number of classes, at most 255; values are in [0, num_classes). 0: unknown, which occurs only in
        the description of a stored column.
      ignores: True if values may also be `IGNORED` (255), which the loss and the metrics leave out.
      values: the value of each class in the stored masks; empty if unknown.

    Raises:
      UsageError: `num_classes` is above 255.
    """

    shape: tuple[int | None, int | None]
    num_classes: int
    ignores: bool = False
    values: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False, kw_only=True)

    def __post_init__(self):
        if self.num_classes > IGNORED:
            raise UsageError(
                f"mask: {self.num_classes} classes; wanted at most {IGNORED}: class {IGNORED} marks ignored pixels"
            )

    @property
    def rank(self) -> int:
        """2, the number of axes of one example: height and width."""
        return 2

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks class numbers [..., H, W] of any integer dtype, and casts them to int32.

        Raises:
          UsageError: the shape does not match, the dtype is no integer, or a number is outside [0, num_classes) and is
            not an accepted `IGNORED`.
        """
        if not _fits(value.shape, self.shape):
            raise UsageError(
                f"{called(name, self)}: shape {value.shape}; wanted {_words(self.shape, 'height', 'width')} per "
                f"example, the size of its image (for a mask with a last axis of 1 write {name}[..., 0])"
            )
        advice = f"write {name}.argmax(-1) for one-hot masks"
        return _class_numbers(self, name, value, self.num_classes, advice, ignored=IGNORED if self.ignores else None)


@dataclasses.dataclass(frozen=True)
class Tokens(FromColumn):
    """The field of the token ids of a text, padded at the end to a fixed length.

    Args:
      length: the number of tokens of an example.
      vocabulary: the vocabulary size; token ids are in [0, vocabulary).
      document_end: the end-of-text token, if a row holds several documents that must not see each other; None: all
        tokens of a row are one text.
    """

    length: int
    vocabulary: int
    document_end: int | None = dataclasses.field(default=None, repr=False, kw_only=True)

    @property
    def rank(self) -> int:
        """1, the number of axes of one example: the position of a token."""
        return 1

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks token ids [..., length] of any integer dtype, and casts them to int32.

        Raises:
          UsageError: the last axis has another length, the dtype is no integer, or an id is outside [0, vocabulary).
        """
        if not _fits(value.shape, (self.length,)):
            raise UsageError(
                f"{called(name, self)}: shape {value.shape}; wanted [{self.length}] per example; write --data.length"
            )
        return _class_numbers(self, name, value, self.vocabulary, "does the tokenizer match the model?")


@dataclasses.dataclass(frozen=True)
class Length(FromColumn):
    """The field of the number of tokens of a text that are not padding.

    Args:
      largest: the largest length; values are in [0, largest].
    """

    largest: int

    @property
    def rank(self) -> int:
        """0: a scalar."""
        return 0

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks lengths of any integer dtype and shape, and casts them to int32.

        Raises:
          UsageError: the dtype is no integer, or a length is outside [0, largest].
        """
        return _class_numbers(self, name, value, self.largest + 1, "wanted the number of tokens that are not padding")


@dataclasses.dataclass(frozen=True)
class Numbers(FromColumn):
    """The field of numbers for a user's own objective.

    Integers become int32, floating point becomes float32, and bool stays bool.

    Args:
      shape: the shape of one example.
      dtype: the dtype in a batch: int32, float32 or bool.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def rank(self) -> int:
        """The number of axes of one example, without the batch axis."""
        return len(self.shape)

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks numbers [..., *shape] and casts them to the dtype of the field. NaN and infinity stay.

        Raises:
          UsageError: the shape does not match, the numbers are of another kind than the field (integers, floating point
            or bool), an integer does not fit int32, or a finite number overflows float32.
        """
        if not _fits(value.shape, self.shape):
            raise UsageError(
                f"{called(name, self)}: shape {value.shape}; wanted {self.shape}, that of the first example"
            )
        dtype = dtype_of_numbers(name, value.dtype)
        if dtype != self.dtype:
            raise UsageError(
                f"{called(name, self)}: dtype {value.dtype}; wanted {self.dtype}, that of the first example"
            )
        with np.errstate(over="ignore"):
            cast = value.astype(dtype, copy=False)
        if dtype.kind == "i" and (changed := value[cast != value]).size:
            raise UsageError(
                f"{called(name, self)}: {changed[0]} does not fit int32; wanted numbers from -2**31 up, below 2**31"
            )
        if dtype.kind == "f" and (infinite := value[np.isinf(cast) & np.isfinite(value)]).size:
            raise UsageError(f"{called(name, self)}: {infinite[0]} overflows float32; scale it {_LINE}")
        return cast


def dtype_of_numbers(name: str, dtype: np.dtype) -> np.dtype:
    """Chooses the batch dtype of numbers stored as `dtype`: int32 for integers, float32 for floats, bool for bool.

    Raises:
      UsageError: `dtype` is complex or not numeric.
    """
    if dtype.kind == "b":
        return np.dtype(bool)
    if np.issubdtype(dtype, np.integer):
        return np.dtype(np.int32)
    if is_floating(np.empty(0, dtype)):
        return np.dtype(np.float32)
    raise UsageError(f"{name}: dtype {dtype}; wanted integers, floating-point numbers or bool; convert it {_LINE}")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    ends = shape[len(shape) - len(wanted) :]
    return len(shape) >= len(wanted) and all(w in (None, size) for size, w in zip(ends, wanted, strict=True))


def _words(shape: tuple[int | None, ...], *names: str) -> str:
    return f"[{', '.join(str(n) if size is None else str(size) for size, n in zip(shape, names, strict=True))}]"


def outputs_of(fields: Mapping[str, Any]) -> int:
    """The number of outputs of a classifier: of classes, of numbers or of labels."""
    return next(field.outputs for name, field in fields.items() if name in PREDICTED)


def batch_shapes(fields: Fields, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes the arrays of a batch by shape and dtype, for tracing without data.

    Images are uint8 [B, H, W, C], or float32 if image files have more than 8 bits. `Numbers` of a user's own task have
    the dtype of their field. All other fields are int32 [B, ...]. Images that are stored as arrays of floats are
    described as uint8, although their batches are float32, because an `Image` does not hold the dtype of arrays.
    """

    def shape_of(field) -> tuple[int, ...]:
        if isinstance(field, Tokens):
            return (field.length,)
        return getattr(field, "shape", ())

    def dtype_of(field) -> Any:
        return field.depth.dtype if isinstance(field, Image) else getattr(field, "dtype", jnp.int32)

    return {
        name: jax.ShapeDtypeStruct((batch_size, *shape_of(field)), dtype_of(field)) for name, field in fields.items()
    }


def called(name: str, field: Field | None) -> str:
    """Formats the name of a field for messages: `name`, or `name (origin)` if the field has an origin."""
    return f"{name} ({field.origin})" if field and field.origin else name


def _class_numbers(
    field: Field, name: str, value: np.ndarray, count: int, advice: str, ignored: int | None = None
) -> np.ndarray:
    if not np.issubdtype(value.dtype, np.integer):
        raise UsageError(
            f"{called(name, field)}: dtype {value.dtype}; wanted integer class numbers in [0, {count}); "
            f"write {name}.astype(np.int32) {_LINE}; {advice}"
        )
    outside = (value < 0) | (value >= count)
    if ignored is not None:
        outside &= value != ignored
    if outside.any():
        besides = " To ignore such examples, write --data.ignore_index" if isinstance(field, Label) else ""
        raise UsageError(
            f"{called(name, field)}: {int(value[outside].flat[0])} is outside [0, {count}); "
            f"wanted class numbers from 0; is num_classes right, and is the split labelled?{besides}"
        )
    if count - 1 > np.iinfo(np.int32).max:
        raise UsageError(f"{called(name, field)}: {count} classes do not fit int32; wanted at most 2**31")
    return value.astype(np.int32)
