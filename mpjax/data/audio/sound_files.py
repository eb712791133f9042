"""Examples whose sounds are files: features are computed when an example is read."""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from mpjax.data.audio.feature_settings import FeatureSettings
from mpjax.data.audio.mel_features import log_mels
from mpjax.data.audio.waveforms import SoundHeader, read_header, read_waveform
from mpjax.data.examples import Example, Examples


SOUND = "sound"
"""The field of log-mel features."""


@dataclasses.dataclass(frozen=True)
class SoundFiles(Examples):
    """Examples with a `sound`, float32 [frames, bins], of a file that is read on access, and arrays in memory.

    Args:
      paths: the files.
      arrays: other fields, arrays [N, ...].
      settings: how sounds become features.
    """

    paths: Sequence[str]
    arrays: Mapping[str, np.ndarray]
    settings: FeatureSettings

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        rest = {name: values[index] for name, values in self.arrays.items()}
        return {SOUND: log_mels(read_waveform(self.paths[index], self.settings), self.settings), **rest}


def notes_on(paths: Sequence[str], split: str, settings: FeatureSettings) -> list[str]:
    """Reads the headers of all files, and says how many have another rate, or several channels.

    Raises:
      UsageError: as `mpjax.data.audio.waveforms.read_header`, which names the file.
    """
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        headers = list(pool.map(functools.partial(read_header, settings=settings), paths))
    return [*_rates(headers, split, settings), *_channels(headers, split)]


def _rates(headers: Sequence[SoundHeader], split: str, settings: FeatureSettings) -> list[str]:
    others = collections.Counter(header.rate for header in headers if header.rate != settings.rate)
    if not others:
        return []
    rates = ", ".join(f"{rate:,} Hz" for rate in sorted(others))
    return [
        f"{split}: {others.total():,} of {len(headers):,} sounds are resampled to {settings.rate:,} Hz, from {rates}"
    ]


def _channels(headers: Sequence[SoundHeader], split: str) -> list[str]:
    several = sum(header.channels > 1 for header in headers)
    return [f"{split}: of {several:,} of {len(headers):,} sounds, the mean of the channels is taken"] if several else []
