"""Lists the samples of tar files in the layout of WebDataset: consecutive files KEY.EXTENSION are one sample."""

import dataclasses
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpjax.data.images.decoding import FileBytes
from mpjax.errors import UsageError, first_line, is_exhausted


_BLOCK = 512  # bytes: a tar file consists of blocks
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd


class FileSpan(NamedTuple):
    """The content of a file inside a tar file: its first byte, and its size in bytes."""

    start: int
    size: int


Sample = dict[str, FileSpan]
"""Maps each extension, in lower case and without its dot, to the place of the file."""


def samples_in(path: str) -> list[Sample]:
    """Lists the samples of a tar file, in order, by its headers; contents are skipped, and nothing is extracted.

    A file is named KEY.EXTENSION, where EXTENSION begins behind the first dot of the last part of the name. A name is
    only compared with others, so one with `..` or a leading slash is harmless. Folders, hidden files and files without
    an extension belong to no sample.

    Raises:
      UsageError: the file is compressed, damaged or cut, a member is a link, a device or a file with holes, a key comes
        again after another one, or a sample has two files of one extension. The message names the file.
    """
    samples: dict[str, Sample] = {}
    last = ""
    for name, place in _files(path):
        folder, _, base = name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot or not extension:
            continue
        key, extension = f"{folder}/{stem}", extension.lower()
        if key in samples and key != last:
            raise UsageError(
                f"{path}: the files of sample '{key.lstrip('/')}' are in two places; wanted them one after the other, "
                "as tar --sort=name writes them"
            )
        sample = samples.setdefault(key, {})
        if extension in sample:
            raise UsageError(f"{path}: '{name}' comes twice; wanted one file of each extension in a sample")
        sample[extension] = place
        last = key
    if not samples:
        raise UsageError(f"{path} has no samples; wanted files KEY.EXTENSION, such as 0001.jpg and 0001.cls")
    return list(samples.values())


def _files(path: str) -> Iterator[tuple[str, FileSpan]]:
    """Yields the name and place of each regular file in a tar file that is whole up to its end."""
    with open(path, "rb") as file:
        if (first := file.read(6)).startswith(_COMPRESSED):
            raise UsageError(
                f"{path} is compressed, so that no sample can be reached without all before it; decompress it, as "
                "gunzip does"
            )
        file.seek(0)
        try:
            if not first:
                raise tarfile.ReadError("empty file")
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while member := archive.next():
                    if member.isfile() and not member.issparse():
                        yield member.name, FileSpan(member.offset_data, member.size)
                    elif not member.isdir():
                        raise UsageError(
                            f"{path}: '{member.name}' is a link, a device or a file with holes; wanted regular files"
                        )
                # tarfile takes a damaged header, and a file cut between two members, for the end.
                file.seek(archive.offset)
                if file.read(_BLOCK) != bytes(_BLOCK):
                    raise tarfile.ReadError(f"no header and no end at byte {archive.offset:,}")
        except UsageError:
            raise
        except Exception as error:  # tarfile lets several types through
            if is_exhausted(error):
                raise
            raise UsageError(f"{path} is damaged or cut ({first_line(error)}); copy it again") from error


def contents(path: str, places: np.ndarray) -> Iterator[FileBytes]:
    """Yields the contents of files inside a tar file, each with `PATH:NAME` as its path for messages.

    Args:
      path: the tar file.
      places: the `FileSpan` of each file, int64 [N, 2].

    Raises:
      UsageError: the tar file is shorter than when it was listed.
    """
    with open(path, "rb") as file:
        for start, size in places.tolist():
            file.seek(start - _BLOCK)
            stored = file.read(_BLOCK + size)
            if len(stored) != _BLOCK + size:
                raise UsageError(f"{path} was cut while it was read: byte {start + size:,} is missing; copy it again")
            # The header before the content has up to 100 bytes of the name: enough for a message.
            name = stored[:100].partition(b"\0")[0].decode(errors="replace")
            yield FileBytes.of(stored[_BLOCK:], f"{path}:{name}")


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """The samples of the tar files of one split.

    Args:
      paths: the tar files, in order.
      ends: for each tar file, the number of samples in it and those before it, int64 [shards].
      places: for each extension, the place of the file of each sample, int64 [N, 2]; a size of -1: the sample has none.
    """

    paths: Sequence[str]
    ends: np.ndarray
    places: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, paths: Sequence[str], extensions: Sequence[str] = ()) -> "Shards":
        """Reads the headers of tar files; of `extensions`, or of those of the first sample if that is empty."""
        counts, listed = [], {}
        for path in paths:
            samples = samples_in(path)
            listed = listed or {extension: [] for extension in extensions or samples[0]}
            for extension, places in listed.items():
                places.append(_places(samples, extension))
            counts.append(len(samples))
        return cls(paths, np.cumsum(counts), {name: np.concatenate(places) for name, places in listed.items()})

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read_all(self, extension: str) -> list[FileBytes]:
        """Reads the content of every file of one extension, in order."""
        starts = [0, *self.ends[:-1].tolist()]
        ranges = zip(self.paths, starts, self.ends.tolist(), strict=True)
        return [stored for path, start, end in ranges for stored in contents(path, self.places[extension][start:end])]

    def read_one(self, extension: str, index: int) -> FileBytes:
        """Reads the content of the file of sample `index`."""
        path = self.paths[int(np.searchsorted(self.ends, index, side="right"))]
        return next(contents(path, self.places[extension][index : index + 1]))

    def require(self, extension: str) -> None:
        """Raises UsageError if a sample has no file of the extension; the message names its tar file."""
        if extension not in self.places:
            raise UsageError(f"{self.paths[0]}: no sample has a file .{extension}, which those of another split have")
        if (missing := np.flatnonzero(self.places[extension][:, 1] < 0)).size:
            shard = int(np.searchsorted(self.ends, missing[0], side="right"))
            number = int(missing[0] - (self.ends[shard - 1] if shard else 0))
            raise UsageError(
                f"{self.paths[shard]}: sample {number} has no file .{extension}, which others have; wanted the same "
                f"extensions in all samples ({missing.size} of {len(self)} lack it)"
            )


def _places(samples: Sequence[Sample], extension: str) -> np.ndarray:
    return np.asarray([sample.get(extension, (0, -1)) for sample in samples], np.int64)
