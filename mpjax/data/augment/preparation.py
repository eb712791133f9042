"""Builds the function that prepares a batch on the device: mpjax's augmentations, normalisation and the user's own."""

import functools
from collections.abc import Callable, Mapping

import jax

from mpjax.config.schema import Data
from mpjax.config.user_calls import named_failure, require_call
from mpjax.config.user_code import load_function
from mpjax.data.augment.on_device import prepare
from mpjax.data.beside_images import require_together
from mpjax.data.fields import Fields
from mpjax.errors import UsageError


Prepare = Callable[[Mapping[str, jax.Array], jax.Array | None], Mapping[str, jax.Array]]

_OWN = 6
"""The number of the user's random key, after the keys of mpjax's augmentations."""


def preparation_of(config: Data, fields: Fields) -> Prepare:
    """Builds the function `(batch, key) -> batch` that prepares batches of these fields for the model.

    It augments and normalises images by the settings of `config` (`prepare`), and then calls the user's function
    `config.augment`, if set, with a random key of its own. In evaluation the key is None: images are normalised, and
    nothing is augmented. A batch without `image` reaches the user's function, or the model, unchanged.

    Raises:
      UsageError: the user's function does not exist or does not take (batch, key), or the image would move or mix
        without another field (`require_together`). When the result is called: the user's function fails, returns no
        dict, drops a field, or changes a dtype or the number of examples; or see `prepare`.
    """
    if "image" in fields:
        require_together(config, fields)
    images = functools.partial(prepare, config=config, fields=fields) if "image" in fields else _as_stored
    if not config.augment:
        return images
    flag = f"--data.augment {config.augment}"
    function = load_function(config.augment, flag="--data.augment")
    require_call(function, ("batch", "key"), flag)

    def prepared(batch: Mapping[str, jax.Array], key: jax.Array | None) -> Mapping[str, jax.Array]:
        before = images(batch, key)
        if key is None:
            return before
        with named_failure(f"{flag} failed", function):
            after = function(dict(before), jax.random.fold_in(key, _OWN))
        _require_alike(before, after, flag)
        return after

    return prepared


def _as_stored(batch: Mapping[str, jax.Array], key: jax.Array | None) -> Mapping[str, jax.Array]:
    del key  # nothing is augmented
    return batch


def _require_alike(before: Mapping[str, jax.Array], after: Mapping[str, jax.Array], where: str) -> None:
    """Raises UsageError if `after` is no mapping, lacks a field of `before`, or changes a dtype or number of examples.

    `where` is the setting, for messages. Additional fields and other shapes of an example are accepted.
    """
    if not isinstance(after, Mapping):
        raise UsageError(f"{where} returned {type(after).__name__}; wanted a dict of the same fields")
    if missing := before.keys() - after.keys():
        raise UsageError(f"{where} returned no {min(missing)}; wanted the same fields")
    for name, value in before.items():
        now = after[name]
        if now.dtype != value.dtype or now.shape[:1] != value.shape[:1]:
            raise UsageError(
                f"{where}: {name} is {now.dtype} {now.shape}; wanted {value.dtype} and {value.shape[0]} examples, as "
                "before"
            )
