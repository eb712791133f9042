"""Matches the tensors of a file with the variables of a model and reports every mismatch in one message."""

import dataclasses
import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.models.pretrained.files import FLOATING, StackedTensor, Tensor, variables_of
from mpjax.models.pretrained.layouts.entry import ROW, FileEntry, WeightMap
from mpjax.models.pretrained.layouts.families import layouts_of
from mpjax.precision.float8.history import is_history


if TYPE_CHECKING:
    from flax import nnx


WRAPPERS = ("module.", "model.", "_orig_mod.", "timm_model.")
"""Prefixes that wrappers of a model (data parallel, Lightning, torch.compile) add to all of its keys."""

_SHOWN = 20
_FEW = 4  # patterns, few enough to type


@dataclasses.dataclass(frozen=True)
class Match:
    """The tensors of a file, matched with the variables of a model.

    Attributes:
      layout: the layout of the file.
      tensors: the tensor of each variable, by our path, without skipped variables.
      ignored: the keys of the file that are not used, sorted.
      tied: pairs of tensors of the file that must have equal values; the values are not compared yet.
    """

    layout: WeightMap
    tensors: Mapping[str, Tensor | StackedTensor]
    ignored: tuple[str, ...]
    tied: tuple[tuple[Tensor | StackedTensor, Tensor | StackedTensor], ...]


def match_arrays(
    model: "nnx.Module", tensors: Mapping[str, Tensor], *, layout: str | None = None, skip: Sequence[str] = ()
) -> Match:
    """Finds the tensor of each variable of a model in a file and checks that its shape and dtype fit; reads no values.

    Args:
      model: the model; may be abstract.
      tensors: the tensors of the file, by key.
      layout: the name of the layout; None for the layout with the most keys in the file.
      skip: globs of our paths to leave unchanged, or of the file's keys to leave unread; other keys that the model does
        not use are faults, unless the layout ignores them.

    Raises:
      UsageError: the layout does not exist, a pattern matches nothing, or tensors are missing, unexpected, or of
        another shape or kind of dtype. The message lists up to 20 faults of each kind.
    """
    chosen = _choose(model, tensors, layout)
    variables = variables_of(model)
    keys, layout_keys = _plain_keys(stacked := _stacked(tensors, chosen), chosen)
    # Histories of float8 begin with zeros where a file has none, and belong to the policy of the run that wrote them.
    histories = {path for path in variables if is_history(path) and layout_keys.get(path) not in keys}
    skipped = histories | {path for path in variables if _matches(path, skip)}
    _refuse_idle(skip, [*variables, *tensors, *stacked, *keys])

    # Entries of the layout for variables that this model does not have are ignored.
    key_of = {path: key for path, key in layout_keys.items() if path in variables}
    known = {*key_of.values(), *chosen.tied}
    idle = {
        key
        for key, tensor in keys.items()
        if key not in known
        and (
            is_history(key.replace(".", "/"))
            or _matches(key, chosen.ignored)
            or _matches(key, skip)
            or _matches(tensor.key, skip)
        )
    }
    spare = {key: tensor.key for key, tensor in keys.items() if key not in known | idle}

    faults, matched, patterns = [], {}, []
    for path in sorted(variables.keys() - skipped):
        if path not in key_of:
            faults.append(f"missing: {path}, for which the {chosen.name} layout has no key")
        elif key_of[path] not in keys:
            # Only for the faults that are shown, because comparing all pairs of names takes seconds.
            near = [keys[key].key for key in _nearest(key_of[path], spare or keys)] if len(faults) < _SHOWN else []
            faults.append(f"missing: {chosen.entries[path].key} ({path}){_or_nearest(near)}")
        else:
            matched[path] = keys[key_of[path]]
            unfit = _unfit(path, variables[path].get_value(), chosen.entries[path], matched[path])
            patterns += [_pattern(path, "/")] if unfit else []
            faults += unfit
    patterns += [_pattern(path, "/") for path in variables.keys() - skipped - matched.keys()]
    patterns += [_pattern(name, ".") for name in spare.values()]
    absent = [key for path, key in key_of.items() if path not in matched]
    for number, (key, name) in enumerate(spare.items()):
        near = _nearest(key, absent or known) if number < _SHOWN else []
        faults.append(f"unexpected: {name}{_or_nearest(near)}")
    if faults:
        raise UsageError(_summary(faults, chosen) + _skip_advice(faults, sorted(set(patterns)), len(variables)))

    used = {tensor.key for tensor in matched.values()}
    unread = sorted(tensor.key for key, tensor in keys.items() if tensor.key not in used and key not in chosen.tied)
    tied = tuple((keys[a], keys[b]) for a, b in chosen.tied.items() if a in keys and b in keys)
    return Match(chosen, matched, tuple(unread), tied)


def foreign_shape(shape: tuple[int, ...], entry: FileEntry) -> tuple[int, ...]:
    """Computes the shape that the file's tensor must have for a variable with `shape` in our model.

    If several variables share the tensor, it is the shape of the whole tensor.
    """
    # The transform runs on a broadcast scalar, which takes no memory.
    file_shape = list(entry.transform.write(np.broadcast_to(np.zeros((), bool), shape)).shape)
    if entry.part:
        file_shape[entry.part.axis] *= entry.part.count
    return tuple(file_shape)


def _choose(model: "nnx.Module", tensors: Mapping[str, Tensor], name: str | None) -> WeightMap:
    """Chooses the layout by name, or the one with the most keys in the file; raises UsageError if none fits."""
    known = layouts_of(model)
    if name is not None:
        if name not in known:
            raise UsageError(f"no layout '{name}' for {type(model).__name__}: wanted one of {', '.join(known)}")
        return known[name](model)
    reasons, scored = [], []
    for title, make in known.items():
        try:
            layout = make(model)
        except UsageError as error:
            reasons.append(f"\n  {title}: {error}")
            continue
        keys, layout_keys = _plain_keys(_stacked(tensors, layout), layout)
        hits = sum(key in keys for key in layout_keys.values())
        first = next(iter(layout.entries.values()), None)
        reasons.append(f"\n  {title}: expects keys such as {first.key if first else '(none)'}")
        scored.append((hits, layout))
    hits, best = max(scored, key=lambda pair: pair[0])  # the first layout wins a tie
    if not hits:
        some = ", ".join(list(tensors)[:3]) or "no tensors at all"
        raise UsageError(f"the file matches no layout of {type(model).__name__}: it has {some}{''.join(reasons)}")
    return best


def _stacked(tensors: Mapping[str, Tensor], layout: WeightMap) -> Mapping[str, Tensor | StackedTensor]:
    """Replaces the tensors that a layout stacks (`FileEntry.rows`) by their stacks, whose keys have `ROW` in them.

    Raises:
      UsageError: a stack lacks a row, or its rows differ in shape or dtype.
    """
    keys = [entry.key.split(ROW, 1) for entry in layout.entries.values() if entry.rows]
    if not keys:
        return tensors
    ends = {(head.split(".")[-2], tail) for head, tail in keys}
    pattern = re.compile(
        "|".join(rf"(?:.*\.)?{re.escape(name)}\.(\d+){re.escape(tail)}" for name, tail in sorted(ends))
    )
    rows: dict[str, dict[int, Tensor]] = {}
    rest: dict[str, Tensor | StackedTensor] = {}
    for key, tensor in tensors.items():
        if match := pattern.fullmatch(key):
            group = match.lastindex or 0
            name = f"{key[: match.start(group)]}{ROW}{key[match.end(group) :]}"
            rows.setdefault(name, {})[int(match[group])] = tensor
        else:
            rest[key] = tensor
    for name, numbered in rows.items():
        first = numbered[min(numbered)]
        if absent := [name.replace(ROW, str(n)) for n in range(max(numbered) + 1) if n not in numbered]:
            raise UsageError(f"missing: {', '.join(absent[:_SHOWN])}, but {first.key} is there; nothing was loaded")
        for row in numbered.values():
            if (row.shape, row.dtype) != (first.shape, first.dtype):
                raise UsageError(
                    f"{row.key} is {row.dtype} {row.shape}, and {first.key} is {first.dtype} {first.shape}: wanted "
                    "equal shapes and dtypes; nothing was loaded"
                )
        ordered = tuple(numbered[number] for number in range(len(numbered)))
        rest[name] = StackedTensor(ordered, name, (len(ordered), *first.shape), first.dtype)
    return rest


def _plain_keys(
    tensors: Mapping[str, Tensor | StackedTensor], layout: WeightMap
) -> tuple[dict[str, Tensor | StackedTensor], dict[str, str]]:
    """Strips prefixes from keys: returns the tensors by stripped key, and the stripped key of each of our paths.

    The layout's `base` is removed, and keys of the file get the layout's new names (`renamed`). Raises UsageError if
    two keys of the file become one.

    Prefixes of wrappers are removed from both sides as often as makes the most keys agree, because a prefix such as
    `model.` may also be the name of a submodule.
    """

    def renamed(key: str) -> str:
        for old, new in layout.renamed:
            key = key.replace(old, new)
        return key

    file_keys = _unwrapped(map(renamed, tensors), layout)
    model_keys = _unwrapped((entry.key for entry in layout.entries.values()), layout)
    plain, wanted = max(itertools.product(file_keys, model_keys), key=lambda pair: len({*pair[0]} & {*pair[1]}))
    if len(set(plain)) < len(plain):
        twice = sorted(tensor.key for key, tensor in zip(plain, tensors.values(), strict=True) if plain.count(key) > 1)
        raise UsageError(f"keys that name the same variable in the {layout.name} layout: {', '.join(twice)}")
    return dict(zip(plain, tensors.values(), strict=True)), dict(zip(layout.entries, wanted, strict=True))


def _unwrapped(keys: Iterable[str], layout: WeightMap) -> list[list[str]]:
    """Lists all keys without the layout's base, once for each number of prefixes of wrappers that may be removed.

    The first list has all such prefixes removed, the next all but one, and the last none.
    """
    alternatives = [list(keys)]
    while wrapper := next(
        (w for w in WRAPPERS if alternatives[0] and all(key.startswith(w) for key in alternatives[0])), None
    ):
        alternatives.insert(0, [key.removeprefix(wrapper) for key in alternatives[0]])
    return [[key.removeprefix(layout.base) for key in some] for some in alternatives]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_idle(skip: Sequence[str], names: Sequence[str]) -> None:
    """Raises UsageError if `skip` is a string in place of a tuple, or one of its patterns matches none of `names`."""
    if isinstance(skip, str):
        raise UsageError(f"skip is {skip!r}: wanted patterns in a tuple, ({skip!r},)")
    idle = [pattern for pattern in skip if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if idle:
        nearest = [f"'{pattern}' (nearest: {', '.join(_nearest(pattern, names)) or names[0]})" for pattern in idle]
        raise UsageError(
            "skip (on the command line --model.pretrained_skip) matches no variable of the model and no key of the "
            f"file: {'; '.join(nearest)}"
        )


def _unfit(path: str, value, entry: FileEntry, tensor: Tensor | StackedTensor) -> list[str]:
    """Describes, in a list of at most one fault, why a tensor of the file does not fit a variable of the model."""
    expected = foreign_shape(value.shape, entry)
    if tensor.shape != expected:
        return [f"shape: {tensor.key} is {tensor.shape}, wanted {expected} ({path})"]
    if jnp.issubdtype(value.dtype, jnp.floating):
        if tensor.dtype not in FLOATING.values():
            return [f"dtype: {tensor.key} is {tensor.dtype}, wanted one of {', '.join(FLOATING.values())} ({path})"]
    elif tensor.dtype != value.dtype.name:
        return [f"dtype: {tensor.key} is {tensor.dtype}, wanted {value.dtype.name} ({path})"]
    return []


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), n=2, cutoff=0.6)


def _or_nearest(names: list[str]) -> str:
    return f"; nearest: {', '.join(names)}" if names else ""


def _summary(faults: list[str], layout: WeightMap) -> str:
    """Formats the faults, sorted by kind, with at most `_SHOWN` of each kind."""
    shown = []
    for kind in ("missing", "unexpected", "shape", "dtype"):
        these = [fault for fault in faults if fault.startswith(kind)]
        shown += these[:_SHOWN] + ([f"{kind}: {len(these) - _SHOWN} more"] if these[_SHOWN:] else [])
    title = f"the file does not fit the model (read in the {layout.name} layout; nothing was loaded):"
    return "\n  ".join([title, *shown])


def _pattern(name: str, separator: str) -> str:
    """The glob for all variables, or keys of a file, in and below the module that holds `name`; else `name` itself."""
    module = name.rpartition(separator)[0]
    return f"{module}{separator}*" if module else name


def _skip_advice(faults: list[str], patterns: list[str], variables: int) -> str:
    """Formats advice to skip the `patterns` of the modules that do not fit, if they are at most `_FEW`.

    Empty if half of the model's `variables` or more do not fit, as for another model, or if a dtype does not fit.
    """
    of_model = sum(not fault.startswith("unexpected") for fault in faults)
    if len(patterns) > _FEW or 2 * of_model >= variables or any(fault.startswith("dtype") for fault in faults):
        return ""
    quoted = [f"'{pattern}'" for pattern in patterns]
    return (
        f"\nto skip them (variables keep their initial values, other keys of the file are not read), write "
        f"--model.pretrained_skip {' '.join(quoted)}, in Python skip=({', '.join(quoted)},)"
    )
