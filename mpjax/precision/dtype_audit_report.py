"""What an audit found: operations and leaves by dtype, faults, and how they print."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mpjax import strict_json


class Operation(NamedTuple):
    """Operations of one kind in one module.

    Attributes:
      path: named scopes (module path); empty outside all of them.
      operation: the primitive, as `dot_general`.
      kind: "cast", or the list of autocast it is on: "low" (products), "full" (float32), "widest" or "as_traced".
      dtype: what it computes in: the widest of its floating inputs, or of its outputs where it has none; of a cast,
        what it casts to.
      count: how many; those in a loop count once.
    """

    path: str
    operation: str
    kind: str
    dtype: np.dtype
    count: int


class Leaf(NamedTuple):
    """A floating array that goes in.

    Attributes:
      path: where in its argument.
      dtype: what it has.
      wanted: what the policy stores it in; None if no policy was given, or it is no parameter or statistic.
    """

    path: str
    dtype: np.dtype
    wanted: np.dtype | None


class Upcast(NamedTuple):
    """A half-precision value that was widened because it met a wider one, and not because anyone asked.

    Attributes:
      path: named scopes (module path).
      operation: the primitive for which it was widened.
      from_dtype: what it was.
      to_dtype: what it became.
      shape: of the value.
      source: file and line.
    """

    path: str
    operation: str
    from_dtype: np.dtype
    to_dtype: np.dtype
    shape: tuple[int, ...]
    source: str


class WeakType(NamedTuple):
    """A value typed as a Python number is; the same function compiles again when it comes as an array.

    Attributes:
      path: where in the arguments or in the result.
      direction: "argument" or "result".
      dtype: what it has.
    """

    path: str
    direction: str
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` found. Prints as a table, iterates over `operations`, and is true when it found no fault.

    Attributes:
      policy: the policy it was held against, as text; None if none.
      operations: all floating operations, in program order of modules.
      leaves: all floating arrays in the arguments (and in a module that is the function).
      upcasts: values widened silently in the forward pass.
      products: products in another dtype than the policy's.
      disobeying: leaves in another dtype than the policy's.
      weak_types: weakly typed arguments and results.
      narrow: operations of the float32 list that run in half precision: not faults, but the first suspects.
    """

    policy: str | None
    operations: tuple[Operation, ...]
    leaves: tuple[Leaf, ...]
    upcasts: tuple[Upcast, ...]
    products: tuple[Operation, ...]
    disobeying: tuple[Leaf, ...]
    weak_types: tuple[WeakType, ...]
    narrow: tuple[Operation, ...]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __bool__(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """One line for each silent upcast, disobeying product or leaf, and weak type."""
        return [
            *(
                f"{_where(u.path)}: {u.from_dtype} {list(u.shape)} silently becomes {u.to_dtype} for {u.operation}, "
                f"{u.source}"
                for u in self.upcasts
            ),
            *(
                f"{_where(o.path)}: {o.count} {o.operation} in {o.dtype}, which is not the policy's"
                for o in self.products
            ),
            *(f"{leaf.path}: stored in {leaf.dtype}, the policy says {leaf.wanted}" for leaf in self.disobeying),
            *(
                f"{w.direction} {w.path or '(the value itself)'}: weakly typed {w.dtype}; "
                f"make it an array, as jnp.asarray(x, jnp.{w.dtype}), or the function compiles again"
                for w in self.weak_types
            ),
        ]

    def assert_clean(self) -> None:
        """For tests: raises AssertionError with every fault on a line of its own."""
        __tracebackhide__ = True
        if self.faults:
            raise AssertionError("\n".join([_verdict(self.faults), *self.faults]))

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """All of it as JSON text, also written to `file` if given; dtypes by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = {
            name: [row._asdict() for row in value] if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
        text = strict_json.encode({**rows, "faults": self.faults}, default=str, indent=2)
        if file is not None:
            pathlib.Path(file).write_text(text + "\n")
        return text

    def __rich__(self):
        from rich.table import Table

        table = Table(
            "module", "products", "float32 list", "other", "casts to", box=None, pad_edge=False, header_style="bold"
        )
        for path in dict.fromkeys(row.path for row in self.operations):
            here = [row for row in self.operations if row.path == path]
            kinds = [{"low"}, {"full"}, {"widest", "as_traced"}, {"cast"}]
            table.add_row(_where(path), *(_counts(row for row in here if row.kind in kind) for kind in kinds))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, color_system=None)
        with console.capture() as captured:
            console.print(self)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        if self.narrow:
            lines += ["", "of the float32 list, in half precision:"]
            lines += [f"  {_where(o.path)}: {o.count} {o.operation} in {o.dtype}" for o in self.narrow]
        return "\n".join([*lines, "", _verdict(self.faults), *(f"  {fault}" for fault in self.faults)])


def _verdict(faults: list[str]) -> str:
    if not faults:
        return "no faults"
    return "1 fault:" if len(faults) == 1 else f"{len(faults)} faults:"


def _where(path: str) -> str:
    return path or "(outside modules)"


def _counts(rows: Iterable[Operation]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row.dtype)] = counts.get(str(row.dtype), 0) + row.count
    return ", ".join(f"{count} {dtype}" for dtype, count in counts.items())
