"""The data that the settings of a stored run name: told on stderr, because the run may be somebody else's."""

import pathlib
import sys
from collections.abc import Iterator

from mpjax.config.schema import Config
from mpjax.errors import printable


def tell_data(stored: Config, where: pathlib.Path, said: Config | None = None) -> None:
    """Prints a line about the data that a stored run names, if there are any.

    Args:
      stored: the settings of the run.
      where: the folder of the run.
      said: the settings that the user gave, whose data are not the run's.
    """
    given = dict(_data_of(said)) if said else {}
    named = [f"--{name} {value}" for name, value in _data_of(stored) if given.get(name) != value]
    if named:
        print(printable(f"the run in {where} names what is read, as data alone: {', '.join(named)}"), file=sys.stderr)


def _data_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the settings that name files, folders or sets of the Hugging Face Hub."""
    if config.data.name.startswith(_ELSEWHERE):
        yield "data.name", config.data.name
    if mixed := [name for name in config.data.mix if name.startswith(_ELSEWHERE)]:
        yield "data.mix", " ".join(mixed)
    if config.data.data_dir:
        yield "data.data_dir", config.data.data_dir
    if config.data.tokenizer not in ("bytes", "words"):
        yield "data.tokenizer", config.data.tokenizer
    if config.model.pretrained:
        yield "model.pretrained", config.model.pretrained


_ELSEWHERE = ("folder:", "hf:")
