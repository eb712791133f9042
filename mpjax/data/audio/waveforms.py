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

_SILENT = 1e-3
"""The largest sample of a sound that may be noise alone."""


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
    if about.format != "FLAC":
        _require_whole(path)
    if about.frames >= 2**36:  # of flac, which has 36 bits for the number; 0 stands for one that is not known
        raise UsageError(f"{path}: its header does not say how long it is, as in a stream; write it again as a file")
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
    size, large = os.stat(path).st_size, None
    with open(path, "rb") as file:
        order = ">" if file.read(4) == b"RIFX" else "<"
        file.seek(12)
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack(f"{order}4sI", chunk)
            if name == b"ds64" and length >= 16:  # of RF64: the sizes that 32 bits cannot hold
                large = struct.unpack("<8xQ", file.read(16))[0]
                length -= 16
            if name == b"data":
                length = large if length == 0xFFFFFFFF and large is not None else length
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
    mixed = samples.mean(axis=1)
    if loudest > _SILENT and np.max(np.abs(mixed)) < 1e-4 * loudest:
        raise UsageError(
            f"{path}: its channels cancel each other, and their mean is silence; write one of them alone, or remove it"
        )
    return resampled(mixed, rate, settings.rate)


def resampled(waveform: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Resamples a waveform [S] from one rate to another, through a low-pass filter; the same if the rates are."""
    if rate == wanted:
        return waveform
    from scipy.signal import resample_poly

    common = int(np.gcd(rate, wanted))
    return np.asarray(resample_poly(waveform, wanted // common, rate // common))
