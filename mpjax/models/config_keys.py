"""Takes the keys of a `config.json` of Hugging Face transformers one by one, and refuses those that nobody takes.

A key is understood, or it is known to change no output, or it is an error: a model that was built without it would
compute something else without a word.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mpjax.errors import UsageError
from mpjax.strict_json import encode


T = TypeVar("T")

CONFIG = "config.json"

_NO_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",  # checked beside `model_type`
        "bos_token_id",
        "cache_implementation",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys that change no output: tokens with a meaning, dtypes of the file, initial values, and what generation does."""

_NONE = object()


def read_object(file: pathlib.Path) -> Any:
    """Reads a JSON file of a folder of Hugging Face files; raises UsageError if it is absent or damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {file}: wanted the folder of a model of Hugging Face") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({error}); fetch it again") from error


def read_config(folder: pathlib.Path, settings_of: Callable[[Any], T]) -> T:
    """Reads the settings of a network from the config.json of a folder, by a function from the content of that file.

    Raises:
      UsageError: the file is absent or damaged, or `settings_of` refuses it; the message names the file.
    """
    file = folder / CONFIG
    config = read_object(file)
    try:
        return settings_of(config)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


class ConfigKeys:
    """The keys of a `config.json`, each of which is taken once; what nobody takes is refused."""

    def __init__(
        self,
        values: Mapping[str, Any],
        prefix: str = "",
        *,
        network: str = "decoder",
        file: str | pathlib.Path = CONFIG,
    ):
        self._rest = dict(values)
        self._prefix = prefix
        self._network = network
        self._file = file

    def take(self, key: str, kind: type, default: Any = _NONE, *, null: bool = False) -> Any:
        """Removes a key and returns its value: `str`, `int`, `float` (also an integer), `bool`, `list` or `dict`.

        With `null`, or a default of None, the value may be null, which returns None. A missing key returns the default.
        Raises UsageError if the value has another type, or a key without a default is missing.
        """
        if key not in self._rest:
            if default is _NONE:
                raise UsageError(f"{self._prefix}{key} is missing: wanted {_KINDS[kind]}")
            return default
        value = self._rest.pop(key)
        if value is None and (null or default is None):
            return None
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.refusal(key, value, f"wanted {_KINDS[kind]}")
        return value

    def size(self, key: str, default: Any = _NONE, *, null: bool = False) -> Any:
        """Removes a key and returns its value, a whole number of at least 1; otherwise like `take`."""
        value = self.take(key, int, default, null=null)
        if value is not None and value < 1:
            raise self.refusal(key, value, "wanted at least 1")
        return value

    def side(self, key: str, default: int) -> int:
        """Removes a key and returns the side of a square: a whole number of at least 1, or two equal ones in a list.

        A missing key returns the default. Raises UsageError for another value.
        """
        value: Any = self._rest.pop(key, default)
        sides: list[Any] = value if isinstance(value, list) and len(value) == 2 else [value]
        if not all(type(side) is int and side >= 1 and side == sides[0] for side in sides):
            raise self.refusal(key, value, "wanted the side of a square, a whole number of at least 1")
        return sides[0]

    def number(self, key: str, default: float | None, *, below: float = math.inf) -> Any:
        """Removes a key and returns its value, a number from 0 to `below`, which it is not; otherwise like `take`."""
        value = self.take(key, float, default)
        if value is not None and not 0 <= value < below:
            raise self.refusal(key, value, f"wanted a number of at least 0 and below {below:g}")
        return value

    def one_of(self, key: str, names: Mapping[str, Any], default: Any = _NONE) -> Any:
        """Removes a key and returns its value, one of `names`; a missing key returns the default.

        Raises UsageError for another value, or if a key without a default is missing.
        """
        value = self._rest.pop(key, default)
        wanted = f"wanted {' or '.join(names)}"
        if value is _NONE:
            raise UsageError(f"{self._prefix}{key} is missing: {wanted}")
        if not isinstance(value, str) or value not in names:
            raise self.refusal(key, value, wanted)
        return value

    def only(self, key: str, *values: Any) -> None:
        """Removes a key that may be missing, or have one of these values; raises UsageError for another value.

        These values change no logit. Values of another type are not equal, such as 0 and 0.0.
        """
        value = self._rest.pop(key, values[0])
        if not any(value == other and type(value) is type(other) for other in values):
            wanted = " or ".join(encode(other) for other in values)
            raise self.refusal(key, value, f"the {self._network} of mpjax has {wanted} only")

    def unused(self, *keys: str) -> None:
        """Removes keys whose values do not matter, because another key replaces them; they may be missing."""
        for key in keys:
            self._rest.pop(key, None)

    def refusal(self, key: str, value: Any, wanted: str) -> UsageError:
        """Makes the UsageError for a value of a key, to be raised by the caller; `wanted` ends the message."""
        return UsageError(f"{self._prefix}{key} is {encode(value)}: {wanted}")

    def refuse_rest(self) -> None:
        """Raises UsageError that names every key that was not taken, with its value."""
        rest = {key: value for key, value in self._rest.items() if self._prefix or key not in _NO_EFFECT}
        if rest:
            listed = ", ".join(f"{self._prefix}{key} {encode(value)}" for key, value in rest.items())
            raise UsageError(
                f"mpjax does not know {listed}: a model without it may compute something else; if it changes no logit, "
                f"remove it from {self._file}"
            )


_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
