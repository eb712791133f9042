"""Which examples a split expression such as `train[:90%]` means, for sets that are not tensorflow-datasets' own."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from mpjax.data.contract import require_examples
from mpjax.errors import UsageError


class Part(NamedTuple):
    """Examples `start` to `stop` (not included) of a split."""

    split: str
    start: int
    stop: int


def parts_of(expression: str, sizes: Mapping[str, int], set_name: str) -> list[Part]:
    """The parts that make up a split, in order.

    Args:
      expression: in tensorflow-datasets' notation: `train`, `train[:90%]`, `train[100:200]`, `train+test`, `all`.
      sizes: examples of each split there is.
      set_name: for messages.

    Raises:
      UsageError: there is no such split, it cannot be read, or it is empty; the message lists what there is.
    """
    import tensorflow_datasets as tfds

    instruction: Any = tfds.core.ReadInstruction
    infos = {name: SimpleNamespace(num_examples=size) for name, size in sizes.items()}
    try:
        found = instruction.from_spec(expression).to_absolute(infos)
    except (ValueError, NotImplementedError) as error:
        names = list(sizes)
        one = names[0] if names else "train"
        raise UsageError(
            f"split '{expression}' of '{set_name}': {str(error).splitlines()[0]}; it has "
            + ", ".join(f"{name} ({size} examples)" for name, size in sizes.items())
            + f"; write --data.train_split or --data.test_split with one of these, or parts of one: '{one}[:90%]' and "
            f"'{one}[90%:]'"
        ) from error
    parts = [Part(part.splitname, *slice(part.from_, part.to).indices(sizes[part.splitname])[:2]) for part in found]
    require_examples(expression, sum(max(part.stop - part.start, 0) for part in parts))
    return parts


def base_names(expression: str) -> list[str]:
    """The splits that an expression is made of: `train+test[:10]` of `train` and `test`."""
    return [name.partition("[")[0].strip() for name in expression.split("+")]
