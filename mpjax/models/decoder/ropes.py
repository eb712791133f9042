"""Reads the position embeddings of a decoder from the keys of its `config.json`, in the forms of old and new files."""

from mpjax.models.config_keys import ConfigKeys
from mpjax.models.rope_keys import rope_of
from mpjax.models.rotary import Rope


def rope_in(keys: ConfigKeys, length: int, *, theta: float = 10_000.0) -> Rope:
    """Reads the position embeddings from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files.

    Args:
      keys: the keys of the file.
      length: the number of positions that the model was trained on, if the file does not say it.
      theta: the base of the frequencies, if the file does not say it.
    """
    outer = keys.take("rope_theta", float, None)
    new, old = (keys.take(key, dict, None) for key in ("rope_parameters", "rope_scaling"))
    if new and old:
        raise keys.refusal("rope_scaling", old, "wanted it or rope_parameters, not both")
    keys.only("partial_rotary_factor", 1.0, 1, None)
    name = "rope_scaling" if old else "rope_parameters"
    return rope_of(ConfigKeys(new or old or {}, f"{name}."), length, outer=outer, usual=theta)


def gemma3_ropes_in(keys: ConfigKeys, length: int) -> tuple[Rope, Rope]:
    """Reads the position embeddings of layers without a window, and those of layers with one, in this order.

    `rope_scaling` of older files is for layers without a window.
    """
    outer = keys.take("rope_theta", float, None), keys.take("rope_local_base_freq", float, None)
    new, old = (keys.take(key, dict, None) for key in ("rope_parameters", "rope_scaling"))
    if new and old:
        raise keys.refusal("rope_scaling", old, "wanted it or rope_parameters, not both")
    nested = ConfigKeys(new or {}, "rope_parameters.")
    full, local = (nested.take(kind, dict, None) for kind in ("full_attention", "sliding_attention"))
    nested.refuse_rest()
    names = "rope_scaling." if old else "rope_parameters.full_attention.", "rope_parameters.sliding_attention."
    return (
        rope_of(ConfigKeys(full or old or {}, names[0]), length, outer=outer[0], usual=1_000_000.0),
        rope_of(ConfigKeys(local or {}, names[1]), length, outer=outer[1], usual=10_000.0),
    )
