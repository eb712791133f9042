"""Computes log-mel features of waveforms on the host, as `WhisperFeatureExtractor` of transformers does.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022 (arXiv:2212.04356), section 2.2; the
mel scale and the areas of the filters are those of Slaney's Auditory Toolbox (1998), as in librosa.
"""

import functools

import numpy as np

from mpjax.data.audio.feature_settings import FeatureSettings
from mpjax.errors import UsageError


_LOWEST = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest bin of a sound, from which on bins count as silence."""

_TOP = 8000.0  # hertz
_LINEAR = 1000.0  # hertz, up to which mels are linear in them
_STEP = 200 / 3  # hertz for each mel there
_RATIO = np.log(6.4) / 27  # of frequencies for each mel above it


def log_mels(waveform: np.ndarray, settings: FeatureSettings) -> np.ndarray:
    """Computes log-mel features, float32 [frames, bins], of a waveform, floating [S], padded with silence.

    Everything is in float64 up to the last cast: the power of quiet bins is a hundred millionth of that of loud ones,
    and transforms in float32 round what is left of them to a few digits.

    Raises:
      UsageError: the waveform is longer than `settings.samples`.
    """
    if len(waveform) > settings.samples:
        raise UsageError(f"a sound of {len(waveform)} samples: wanted at most {settings.samples}")
    padded = np.zeros(settings.samples, np.float64)
    padded[: len(waveform)] = waveform
    half = settings.window // 2
    padded = np.pad(padded, half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, settings.window)[:: settings.hop][: settings.frames]
    spectrum = np.fft.rfft(frames * _window(settings.window))
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    logs = np.log10(np.maximum(power @ mel_filters(settings), _LOWEST))
    return ((np.maximum(logs, logs.max() - _RANGE) + 4) / 4).astype(np.float32)


@functools.cache
def _window(size: int) -> np.ndarray:
    """The periodic Hann window, float64 [size]."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)


@functools.cache
def mel_filters(settings: FeatureSettings) -> np.ndarray:
    """The weights of frequencies in mel bins, float64 [1 + window / 2, bins]: triangles of one area each."""
    frequencies = np.linspace(0, settings.rate / 2, 1 + settings.window // 2)
    edges = _hertz(np.linspace(0, _mels(_TOP), settings.bins + 2))
    widths = np.diff(edges)
    slopes = edges[None] - frequencies[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))


def _mels(hertz: float) -> float:
    if hertz < _LINEAR:
        return hertz / _STEP
    return _LINEAR / _STEP + np.log(hertz / _LINEAR) / _RATIO


def _hertz(mels: np.ndarray) -> np.ndarray:
    corner = _LINEAR / _STEP
    return np.where(mels < corner, mels * _STEP, _LINEAR * np.exp(_RATIO * (mels - corner)))
