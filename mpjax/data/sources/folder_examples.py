"""The examples of a folder: files that are read on access, and values in memory."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mpjax.data.examples import Example, Examples
from mpjax.data.images.decoding import FileBytes
from mpjax.data.table import SplitPart


@dataclasses.dataclass(frozen=True)
class FolderExamples(Examples):
    """Examples whose columns are image files, whose bytes are read on access, or values in memory.

    `files` has the paths of the files, and `numbers` arrays [N, ...], of numbers or of texts, by column.
    """

    files: Mapping[str, Sequence[str]]
    numbers: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter({**self.files, **self.numbers}.values())))

    def __getitem__(self, index: int) -> Example:
        read = {name: FileBytes.read(paths[index]) for name, paths in self.files.items()}
        return read | {name: values[index] for name, values in self.numbers.items()}

    def only(self, columns: Sequence[str]) -> "FolderExamples":
        """Builds the same examples with only `columns`; unknown names are ignored."""
        return FolderExamples(
            {name: self.files[name] for name in columns if name in self.files},
            {name: self.numbers[name] for name in columns if name in self.numbers},
        )


def paths_of(splits: Mapping[str, FolderExamples], parts: Sequence[SplitPart], column: str) -> list[str]:
    """The paths of the files of a column in parts of splits, in their order."""
    return [path for part in parts for path in splits[part.split].files[column][part.start : part.stop]]
