"""Reads wav and flac files as waveforms of one channel and one rate of samples."""

import dataclasses
import os
import struct
from typing import Any

import numpy as np

from mpjax.data.audio.feature_settings import FeatureSettings
from mpjax.data.images.decoding import require_regular
from mpjax.errors import UsageError, is_exhausted


ENDINGS = (".wav", ".flac")
_INSTALL = "pip install 'mpjax[audio]'"
_LOUDEST = 16.0
"""The largest sample that a file of floats may have: full scale is 1, and clipped recordings are a little above it."""


@dataclasses.dataclass(frozen=True)
class SoundHeader:
    """What the header of a file says.

    Attributes:
      rate: samples per second of each channel.
      channels: the number of channels.
      samples: the number of samples of each channel.
    """

    rate: int
    channels: int
    samples: int


def require_packages() -> Any:
    """Imports soundfile; raises UsageError that says what to install if a package for sounds is missing."""
    try:
        import scipy.signal  # noqa: F401  # resamples
        import soundfile
    except (ImportError, OSError) as error:  # an OSError where its library is missing
        raise UsageError(f"wav and flac files need soundfile and scipy ({error}); write: {_INSTALL}") from error
    return soundfile


def read_header(path: str, settings: FeatureSettings) -> SoundHeader:
    """Reads the header of a file, and checks that there are samples and not too many.

    Raises:
      UsageError: the file is no wav or flac file, damaged, cut short, empty, or longer than `settings.seconds`; the
        message names it.
    """
    soundfile = require_packages()
    require_regular(path)
    try:
        about = soundfile.info(path)
    except (soundfile.SoundFileError, OSError) as error:
        if is_exhausted(error):
            raise
        raise UsageError(f"{path}: not a wav or flac file that can be read ({error}); repair or remove it") from error
    if about.format not in ("WAV", "WAVEX", "RF64", "FLAC"):
        raise UsageError(f"{path}: a file of {about.format_info}; wanted wav or flac; convert it")
    if about.format == "WAV" or about.format == "WAVEX":
        _require_whole(path)
    if about.frames < 1:
        raise UsageError(f"{path}: has no samples; record it again, or remove it")
    if about.frames > settings.seconds * about.samplerate:
        raise UsageError(
            f"{path}: {about.frames / about.samplerate:.2f} s long; wanted at most {settings.seconds} s, what the "
            "model hears at once; cut it into parts, each with its own text, or remove it"
        )
    return SoundHeader(about.samplerate, about.channels, about.frames)


def _require_whole(path: str) -> None:
    """Raises UsageError if the samples of a wav file end before its header says; libsndfile reads what is there."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        file.seek(12)
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", chunk)
            if name == b"data":
                if length not in (0, 0xFFFFFFFF) and file.tell() + length > size:  # those of a stream
                    raise UsageError(
                        f"{path}: cut short: its header says {length} bytes of samples, and {size - file.tell()} are "
                        "there; copy or record it again, or remove it"
                    )
                return
            file.seek(length + length % 2, os.SEEK_CUR)


def read_waveform(path: str, settings: FeatureSettings) -> np.ndarray:
    """Reads a file as a waveform, float64 [S], at `settings.rate`: the mean of its channels, resampled if need be.

    Integers of any number of bits become numbers from -1 up to 1; floats stay as they are.

    Raises:
      UsageError: as `read_header`; or a sample is NaN, infinite, or far above full scale.
    """
    soundfile, header = require_packages(), read_header(path, settings)
    try:
        samples, rate = soundfile.read(path, dtype="float64", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        if is_exhausted(error):
            raise
        raise UsageError(f"{path}: damaged ({error}); copy or record it again, or remove it") from error
    if len(samples) != header.samples:
        raise UsageError(
            f"{path}: damaged: its header says {header.samples} samples, and {len(samples)} can be read; copy or "
            "record it again, or remove it"
        )
    if not np.isfinite(samples).all():
        first = int(np.argmin(np.isfinite(samples).all(axis=1)))
        raise UsageError(f"{path}: sample {first} is {samples[first].tolist()}; wanted finite samples; repair it")
    if (loudest := float(np.max(np.abs(samples)))) > _LOUDEST:
        raise UsageError(
            f"{path}: floats of up to {loudest:g}, and full scale is 1; divide them, by 32768 if they were integers of "
            "16 bits"
        )
    return resampled(samples.mean(axis=1), rate, settings.rate)


def resampled(waveform: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Resamples a waveform [S] from one rate to another, through a low-pass filter; the same if the rates are."""
    if rate == wanted:
        return waveform
    from scipy.signal import resample_poly

    common = int(np.gcd(rate, wanted))
    return np.asarray(resample_poly(waveform, wanted // common, rate // common))
