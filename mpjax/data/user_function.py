"""Applies the user's `--data.preprocess` function to stored examples."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpjax.config.user_calls import named_failure
from mpjax.config.user_code import Code, load_function
from mpjax.data.examples import Example, Examples, array
from mpjax.data.fields import Image
from mpjax.data.images.decoding import decode
from mpjax.data.table import Column, Text
from mpjax.errors import UsageError


_FLAG = "--data.preprocess"
_TRIED = 16  # the number of examples that determine the shape of a function's result


def load_preprocess(spec: Code) -> Callable[[Example], Mapping[str, Any]]:
    """Loads the user's function that `spec` names, and checks by its signature that it takes one argument.

    A function without a signature, such as some written in C, is not checked.

    Raises:
      UsageError: the function does not exist or cannot be called with one example; the message shows a valid signature.
    """
    function = load_function(spec, flag=_FLAG)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # some functions written in C have no signature
    try:
        signature.bind({})
    except TypeError as error:
        name = str(spec).rpartition(":")[2]
        raise UsageError(
            f"{_FLAG} {spec}: {name}{signature} cannot be called with one example: {error}; write\n"
            f"  def {name}(example): ... return {{...}}\n"
            "with one argument, a dict of fields"
        ) from error
    return function


@dataclasses.dataclass(frozen=True)
class PreprocessedExamples:
    """Examples to which a user's function is applied each time one is read.

    The function receives encoded images as arrays [H, W, C] and texts as str. If it fails or returns no dict, or a text
    is not UTF-8, reading the example raises UsageError.

    Args:
      examples: the stored examples.
      function: a function from a dict of fields to another, which replaces it.
      name: the name of the function, for messages.
      columns: the type of the stored column of each field; values of other fields are passed as they are.
    """

    examples: Examples
    function: Callable[[Example], Mapping[str, Any]]
    name: str
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self._apply(self.examples[index], index)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        examples = self.examples.__getitems__(indices)
        return [self._apply(example, index) for index, example in zip(indices, examples, strict=True)]

    def _apply(self, example: Example, index: int) -> Example:
        fields = {}
        for name, value in example.items():
            try:
                fields[name] = readable(value, self.columns.get(name))
            except UnicodeDecodeError as error:
                raise UsageError(f"example {index}: {name}: not UTF-8: {error}; convert the data to UTF-8") from error
        with named_failure(f"{_FLAG} {self.name} failed on example {index}", self.function):
            result = self.function(fields)
        if not isinstance(result, Mapping):
            raise UsageError(
                f"{_FLAG} {self.name} returned {type(result).__name__}; wanted a dict of fields, "
                f"like the one it received: {', '.join(example)}"
            )
        return dict(result)


def readable(value: Any, column: Column | None) -> Any:
    """Converts a stored value for a user's function: decodes an encoded image to pixels, and UTF-8 bytes to str.

    Values of other types of columns, of an unknown type (None), and images that are arrays are returned unchanged.

    Raises:
      UnicodeDecodeError: a text is not UTF-8.
      UsageError: an image cannot be decoded.
    """
    if isinstance(column, Image):
        return decode(value, column.shape[2], column.depth)
    if isinstance(column, Text) and isinstance(value, bytes):
        return value.decode()
    return value


def shape_after(examples: PreprocessedExamples, name: str) -> tuple[int | None, int | None, int] | None:
    """Finds the shape (H, W, C) of the field `name` after the user's function; None if it is no image there.

    The function runs on up to 16 examples, evenly spaced. The result is None if none of them has the field, or if a
    value does not have three axes. H and W are both None if the sizes of these examples differ. They are also None if
    the stored sizes of the set vary, and the function returned these examples in their stored size. C is taken from the
    first of them.
    """
    stored = examples.columns[name]
    varies = isinstance(stored, Image) and None in stored.shape
    count = min(len(examples), _TRIED)
    chosen = [index * len(examples) // count for index in range(count)]
    results = [array(name, example[name]).shape for example in examples.__getitems__(chosen) if name in example]
    if not results or any(len(shape) != 3 for shape in results):
        return None
    sides = {shape[:2] for shape in results}
    if varies and len(sides) == 1:
        stored_sides = {
            array(name, readable(example[name], stored)).shape[:2] for example in examples.examples.__getitems__(chosen)
        }
        if stored_sides == sides:
            sides = set()
    height, width = sides.pop() if len(sides) == 1 else (None, None)
    return height, width, results[0][2]
