"""The result of an audit: operations and leaves by dtype, and the faults, printed as a table or written as JSON."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mpjax import notebook, strict_json


class Operation(NamedTuple):
    """Operations of one kind in one module.

    Attributes:
      path: the named scopes (module path); empty outside all scopes.
      operation: the primitive, such as `dot_general`.
      kind: "cast", or the autocast list of the primitive: "low" (products), "full" (float32), "widest" or "as_traced".
      dtype: the compute dtype: the widest of the floating inputs, or of the outputs if no input is floating. For a
        cast, the new dtype.
      count: the number of operations; an operation in a loop counts once.
    """

    path: str
    operation: str
    kind: str
    dtype: np.dtype
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]


class Leaf(NamedTuple):
    """A floating array among the inputs.

    Attributes:
      path: the path of the array in the arguments.
      dtype: the dtype of the array.
      wanted: the dtype in which the policy stores the array; None without a policy, or if the array is neither a
        parameter nor a batch statistic.
    """

    path: str
    dtype: np.dtype
    wanted: np.dtype | None


class Upcast(NamedTuple):
    """A half-precision value that was widened to match a wider operand, without an explicit cast.

    Attributes:
      path: the named scopes (module path).
      operation: the primitive that the value was widened for.
      from_dtype: the dtype before.
      to_dtype: the dtype after.
      shape: the shape of the value.
      source: the user's line, `file:line`, that widened the value; "(no source line)" if it is not known.
    """

    path: str
    operation: str
    from_dtype: np.dtype
    to_dtype: np.dtype
    shape: tuple[int, ...]
    source: str


class WeakType(NamedTuple):
    """A weakly typed value, like a Python number. The function compiles again if an array takes its place.

    Attributes:
      path: the path in the arguments or in the result.
      direction: "argument" or "result".
      dtype: the dtype of the value.
    """

    path: str
    direction: str
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of `audit`. Prints as a table, iterates over `operations`, and is true if there are no faults.

    Attributes:
      policy: the policy that the function was compared with, as text; None without a policy.
      operations: all floating operations, in program order.
      leaves: all floating arrays in the arguments, and in the function if it is a module.
      upcasts: values silently widened in the forward pass.
      products: products in another dtype than the policy's.
      disobeying: leaves in another dtype than the policy's.
      weak_types: weakly typed arguments and results.
      narrow: operations of the float32 list that run in half precision. They are not faults, but the first to check.
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
        """One line for each silent upcast, weak type, and product or leaf that differs from the policy."""
        return [
            *(
                f"{_where(u.path)}: {u.from_dtype} {list(u.shape)} silently becomes {u.to_dtype} for {u.operation}, "
                f"{u.source}"
                for u in self.upcasts
            ),
            *(
                f"{_where(o.path)}: {o.count} {o.operation} in {o.dtype}, which is not the policy's compute dtype"
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
        """Raises AssertionError with one line for each fault, for use in tests; does nothing without faults."""
        __tracebackhide__ = True
        if self.faults:
            raise AssertionError("\n".join([_verdict(self.faults), *self.faults]))

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """Encodes the audit and its `faults` as JSON text, with dtypes by name.

        Returns the text. If `file` is given, also writes it there, and replaces a file that exists.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = {
            name: [row._asdict() for row in value] if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
        return strict_json.export({**rows, "faults": self.faults}, file, default=str)

    def _rows(self) -> Iterator[list[str]]:
        for path in dict.fromkeys(row.path for row in self.operations):
            here = [row for row in self.operations if row.path == path]
            kinds = [{"low"}, {"full"}, {"widest", "as_traced"}, {"cast"}]
            yield [_where(path), *(_counts(row for row in here if row.kind in kind) for kind in kinds)]

    def __rich__(self):
        from rich.markup import escape
        from rich.table import Table

        table = Table(*_HEADS, box=None, pad_edge=False, header_style="bold")
        for row in self._rows():
            table.add_row(*map(escape, row))
        return table

    def _repr_html_(self) -> str:
        return notebook.block(
            notebook.heading(_verdict(self.faults)),
            notebook.paragraphs(self.faults),
            notebook.table(_HEADS, self._rows()),
            notebook.paragraphs(self._narrow_lines()),
        )

    _repr_pretty_ = notebook.as_text

    def _narrow_lines(self) -> list[str]:
        lines = [f"  {_where(o.path)}: {o.count} {o.operation} in {o.dtype}" for o in self.narrow]
        return ["operations of the float32 list that run in half precision:", *lines] if lines else []

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=max(160, *(2 * len(row.path) for row in self.operations), 0), color_system=None)
        with console.capture() as captured:
            console.print(self)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        if self.narrow:
            lines += ["", *self._narrow_lines()]
        return "\n".join([*lines, "", _verdict(self.faults), *(f"  {fault}" for fault in self.faults)])


_HEADS = ("module", "products", "float32 list", "other", "casts to")


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
