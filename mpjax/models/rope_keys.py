"""Reads rotary position embeddings, and which layers have a window, from the keys of a `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys
from mpjax.models.layer_kinds import LayerKind
from mpjax.models.rotary import LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling


def kinds_of_layers(
    keys: ConfigKeys, slides: Sequence[bool], window: int | None, rope: Rope, local: Rope
) -> tuple[LayerKind, ...]:
    """Builds the kind of each layer, first to last; `layer_types`, if it is there, decides which have a window.

    Args:
      keys: the keys.
      slides: for each layer, whether it has a window; read if there are no `layer_types`.
      window: the size of the window; with None, a layer with a window raises UsageError.
      rope: the position embeddings of layers without a window.
      local: the position embeddings of layers with a window.
    """
    kinds = {"full_attention": False, "sliding_attention": True}
    named = keys.take("layer_types", list, None)
    if named is not None:
        if len(named) != len(slides) or not all(name in kinds for name in named):
            raise keys.refusal("layer_types", named, f"wanted {' or '.join(kinds)} for each of {len(slides)} layers")
        slides = [kinds[name] for name in named]
    if any(slides) and window is None:
        raise UsageError("sliding_window is null or switched off, and some layers are to have a window")
    return tuple(LayerKind(rope=local, window=window) if slide else LayerKind(rope=rope) for slide in slides)


def rope_of(keys: ConfigKeys, length: int, *, outer: float | None, usual: float, outside: str = "rope_theta") -> Rope:
    """Reads position embeddings from one object of the file, and refuses keys of it that are not known.

    Args:
      keys: the keys of `rope_parameters` or `rope_scaling`.
      length: the number of positions that the model was trained on, if the keys do not say it.
      outer: the base of the frequencies in the file outside of this object, None if there is none; a different
        `rope_theta` inside raises UsageError.
      usual: the base of the frequencies if there is no `rope_theta` at all.
      outside: the name of the key that `outer` is from.
    """
    theta = keys.take("rope_theta", float, outer)
    if outer is not None and theta != outer:
        raise keys.refusal("rope_theta", theta, f"and beside it {outside} is {outer}")
    if theta is not None and theta <= 0:
        raise keys.refusal("rope_theta", theta, "wanted a positive number")
    keys.only("partial_rotary_factor", 1.0, 1, None)
    kind = keys.one_of("rope_type", _SCALINGS, keys.one_of("type", _SCALINGS, "default"))
    scaling = _SCALINGS[kind](keys, length)
    keys.refuse_rest()
    return Rope(theta=float(usual if theta is None else theta), scaling=scaling)


def _linear(keys: ConfigKeys, length: int) -> Scaling:
    del length
    return LinearScaling(factor=keys.take("factor", float))


def _llama3(keys: ConfigKeys, length: int) -> Scaling:
    return Llama3Scaling(
        factor=keys.take("factor", float),
        low=keys.take("low_freq_factor", float),
        high=keys.take("high_freq_factor", float),
        length=keys.size("original_max_position_embeddings", length),
    )


def _yarn(keys: ConfigKeys, length: int) -> Scaling:
    keys.only("mscale", None, 0)
    keys.only("mscale_all_dim", None, 0)
    return YarnScaling(
        factor=keys.take("factor", float),
        low=keys.take("beta_slow", float, None) or 1.0,
        high=keys.take("beta_fast", float, None) or 32.0,
        length=keys.size("original_max_position_embeddings", length),
        attention_factor=keys.take("attention_factor", float, None),
        truncate=keys.take("truncate", bool, True),
    )


_SCALINGS: Mapping[str, Callable[[ConfigKeys, int], Scaling | None]] = {
    "default": lambda keys, length: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""For each `rope_type`, the function that reads its keys, given the length of texts."""
