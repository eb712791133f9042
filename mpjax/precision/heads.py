"""Finds the layers that produce a model's output (heads), and gives their half-precision products float32 results.

A logit of 40 in bfloat16 is off by up to 0.125, and its probability by 13 %. Products add in float32 in any case; a
head keeps the float32 sums.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax

from mpjax.precision.calls import has_call, unwrap, wrap, wrapper_of
from mpjax.precision.float8.layers import default_product, is_linear, is_quantised, tags_of
from mpjax.precision.layers import CONVOLUTION, DOT_GENERAL
from mpjax.precision.module_tree import class_names, declared, with_lists
from mpjax.precision.rules import HEAD, is_norm


_NAMES = re.compile(r"(.*_)?(heads?|classifier|logits|outputs?|out|readout|final|last|fc)(_.*)?", re.IGNORECASE)


def layer_tags(modules: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Tags layers by module path like `tags_of`, and adds the tag `head` to the layers that `heads_of` finds."""
    tags = tags_of(modules)
    return tags | {path: tags.get(path, frozenset()) | {HEAD.removeprefix("type:")} for path in heads_of(modules)}


def heads_of(modules: Mapping[str, Any]) -> list[str]:
    """Finds the paths of the layers that produce a model's outputs, by name and structure.

    A candidate is a `Linear`, `LinearGeneral` or `Conv` with Flax's own product. It is in no list, or it is the last
    layer of a list. Attributes that are numbered one after the other are a list. A head is a candidate with a usual
    name, such as `head`, `lm_head`, `classifier`, `fc` or `output_layer`. Without these names, a head is the only
    linear candidate. Of several, it is the one that the model sets last, except norms and layers without parameters. If
    another layer is last, there is no head. Without linear candidates, a head is the model itself if it is a `Conv`.
    Attention, recurrent cells and models that cannot be called have no head.

    Args:
      modules: the modules of a model by path.
    """
    from flax import nnx

    if "" not in modules or not has_call(type(modules[""])):
        return []
    listed = with_lists(modules)
    inner = [path for path, module in modules.items() if isinstance(module, nnx.RNNCellBase) or _attends(module)]
    last = _last_of_lists({listed[path] for path, module in modules.items() if _has_parameters(module)})
    candidates = [
        path
        for path, module in modules.items()
        if keeps_sums(module)
        and not _is_stacked(module)
        and not any(path.startswith(f"{outer}/" if outer else "") for outer in inner)
        and _is_outermost(listed[path], last)
    ]
    by_name = [path for path in candidates if any(map(_NAMES.fullmatch, path.split("/")))]
    linear = [path for path in candidates if not isinstance(modules[path], nnx.Conv)]
    if len(linear) > 1:
        last_held = _last_held(modules)
        linear = [path for path in linear if re.fullmatch(rf"{re.escape(last_held)}(/\d+)?", path)]
    return by_name or linear or [path for path in candidates if path == ""]


def _last_held(modules: Mapping[str, Any]) -> str:
    """The name of the attribute that a model sets last, of those that hold parameters outside norms; "" without any."""
    layers = {
        path.partition("/")[0]
        for path, module in modules.items()
        if _has_parameters(module) and not is_norm(class_names(module))
    }
    return next((name for name in reversed(declared(modules[""])) if name in layers), "")


def _attends(module: Any) -> bool:
    return any("attention" in name.lower() or "attn" in name.lower() for name in class_names(module))


def _has_parameters(module: Any) -> bool:
    from flax import nnx

    return any(isinstance(held, nnx.Param) for held in vars(module).values())


def _last_of_lists(paths: Iterable[str]) -> dict[str, int]:
    last: dict[str, int] = {}
    for path in paths:
        names = path.split("/")
        for depth, name in enumerate(names):
            if name.isdecimal():
                outer = "/".join(names[:depth])
                last[outer] = max(last.get(outer, 0), int(name))
    return last


def _is_outermost(path: str, last: Mapping[str, int]) -> bool:
    """True for a layer in no list, or one that is itself the last item of a list that is in no other list.

    False for a layer inside an item, such as `blocks/3/up`.

    Args:
      path: the path of the layer, in which numbered attributes are list items.
      last: the last index of each list, by the path of the list.
    """
    *outer, name = path.split("/")
    if any(map(str.isdecimal, outer)):
        return False
    return not name.isdecimal() or last.get("/".join(outer)) == int(name)


def _is_stacked(module: Any) -> bool:
    """True if the kernel of a layer has further axes, as stacked kernels of several layers that a loop takes apart."""
    from flax import nnx

    if isinstance(module, nnx.Conv):
        return module.kernel.ndim != len(module.kernel_size) + 2
    sizes = (module.in_features, module.out_features)
    return module.kernel.ndim != sum(1 if isinstance(size, int) else len(size) for size in sizes)


def keeps_sums(module: Any) -> bool:
    """True for a `Conv`, `Linear` or `LinearGeneral` of Flax whose product `leave_in_float32` can replace.

    False for subclasses, for a layer with a product of the user's own, and for one that multiplies in float8.
    """
    from flax import nnx

    if type(module) is nnx.Conv:
        return module.conv_general_dilated in (jax.lax.conv_general_dilated, CONVOLUTION)
    return type(module) in (nnx.Linear, nnx.LinearGeneral) and is_linear(module) and not is_quantised(module)


def leave_in_float32(module: Any, *, in_float32: bool) -> None:
    """Makes the products of a layer, or the tied logits (`attend`) of an embedding, have float32 results, in place.

    If `in_float32` is False, the layer gets Flax's own product back. Modules that are no embeddings and that
    `keeps_sums` rejects stay unchanged.
    """
    from flax import nnx

    if isinstance(module, nnx.Embed):
        if in_float32:
            wrap(module, AttendsInFloat32())
        else:
            unwrap(module, AttendsInFloat32)
    elif keeps_sums(module) and type(module) is nnx.Conv:
        module.conv_general_dilated = CONVOLUTION if in_float32 else jax.lax.conv_general_dilated
    elif keeps_sums(module):
        module.dot_general = DOT_GENERAL if in_float32 else default_product(module)


@dataclasses.dataclass(frozen=True)
class AttendsInFloat32:
    """A wrapper for an embedding whose tied logits (`attend`) are float32; its calls do not change.

    Creating the first one replaces `nnx.Embed.attend`, for the whole process, by a method that looks for the wrapper on
    each embedding.
    """

    depth: ClassVar[int] = 5

    def __call__(self, call, module, *args, **kwargs):
        """Calls an embedding as without the wrapper, which only changes `attend`."""
        return call(module, *args, **kwargs)

    def __reduce__(self):
        return _attends_in_float32, ()

    def __post_init__(self):
        from flax import nnx

        if not hasattr(nnx.Embed.attend, _NAME):
            nnx.Embed.attend = _looking_for_wrapper(nnx.Embed.attend)


_NAME = "_mpjax_attends"


def _attends_in_float32() -> AttendsInFloat32:
    return AttendsInFloat32()


def _looking_for_wrapper(attend: Callable) -> Callable:
    @functools.wraps(attend)
    def attend_or_logits(self, query, out_sharding=None):
        if wrapper_of(self, AttendsInFloat32) is None:
            return attend(self, query, out_sharding)
        query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        return DOT_GENERAL(query, table, (((query.ndim - 1,), (1,)), ((), ())), out_sharding=out_sharding)

    setattr(attend_or_logits, _NAME, True)
    return attend_or_logits
