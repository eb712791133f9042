"""A user's own function between the stored example and the contract."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpjax.data.examples import Example, Examples
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class PreprocessedExamples:
    """Examples after a function that takes one and gives one."""

    examples: Examples
    function: Callable[[Example], Mapping[str, Any]]
    name: str

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self._apply(self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self._apply(example) for example in self.examples.__getitems__(indices)]

    def _apply(self, example: Example) -> Example:
        result = self.function(example)
        if not isinstance(result, Mapping):
            raise UsageError(
                f"--data.preprocess {self.name} returned {type(result).__name__}; wanted a dict of fields, "
                f"as it was given one: {', '.join(example)}"
            )
        return dict(result)
