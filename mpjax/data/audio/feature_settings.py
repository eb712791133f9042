"""The settings by which sounds become log-mel features: those of `WhisperFeatureExtractor` in transformers."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.data.text.tokenizers import find_tokenizer
from mpjax.errors import UsageError
from mpjax.strict_json import encode


USUAL = "whisper"
"""The `--data.features` of Whisper's own settings, those of a `FeatureSettings` without arguments."""

FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that may have the settings; the second, of transformers 5, has them in `feature_extractor`."""

_CLASS = "WhisperFeatureExtractor"
_UNREAD = frozenset(
    {
        "mel_filters",  # a copy of what is computed from the other settings
        "processor_class",
        "return_attention_mask",  # the network reads padding as silence
    }
)


@dataclasses.dataclass(frozen=True)
class FeatureSettings:
    """How a sound becomes features. The defaults are those of Whisper.

    Attributes:
      bins: the number of mel bins.
      seconds: the length to which sounds are padded with silence, and which none may exceed.
      rate: samples per second.
      window: samples of the window of a frame.
      hop: samples from a frame to the next.
    """

    bins: int = 80
    seconds: int = 30
    rate: int = 16_000
    window: int = 400
    hop: int = 160

    @property
    def samples(self) -> int:
        """The number of samples of a padded sound."""
        return self.seconds * self.rate

    @property
    def frames(self) -> int:
        """The number of frames of a sound."""
        return self.samples // self.hop


def read_features(name: str) -> FeatureSettings:
    """Reads the settings that `--data.features` names: a folder, an id of the Hugging Face hub, or `whisper`.

    Raises:
      UsageError: there is no such folder, it lacks the file, or the file has what mpjax does not know.
    """
    if name in (USUAL, "auto"):
        return FeatureSettings()
    folder = find_tokenizer(name, flag="--data.features")
    for file in (folder / name for name in FILES):
        if file.is_file():
            return _settings_of(file)
    raise UsageError(
        f"--data.features {name}: {folder} has no {FILES[0]}; wanted the folder of a Whisper, or {USUAL} for 80 mel "
        "bins of sounds of up to 30 s"
    )


def _settings_of(file: pathlib.Path) -> FeatureSettings:
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({error}); fetch it again") from error
    if file.name == FILES[1] and isinstance(values, Mapping):
        values = values.get("feature_extractor")
    if not isinstance(values, Mapping):
        raise UsageError(f"{file}: wanted the settings of a {_CLASS}, as transformers writes them")
    rest = {key: value for key, value in values.items() if key not in _UNREAD}

    def take(key: str, usual: Any) -> Any:
        value = rest.pop(key, usual)
        if type(value) is not int or value < 1:
            raise UsageError(f"{file}: {key} is {encode(value)}: wanted a whole number of at least 1")
        return value

    settings = FeatureSettings(
        bins=take("feature_size", 80),
        seconds=take("chunk_length", 30),
        rate=take("sampling_rate", 16_000),
        window=take("n_fft", 400),
        hop=take("hop_length", 160),
    )
    only = {
        "feature_extractor_type": _CLASS,
        "do_normalize": False,
        "dither": 0.0,
        "padding_side": "right",
        "padding_value": 0.0,
        "n_samples": settings.samples,
        "nb_max_frames": settings.frames,
    }
    for key, value in only.items():
        if (said := rest.pop(key, value)) != value or isinstance(said, bool) != isinstance(value, bool):
            raise UsageError(f"{file}: {key} is {encode(said)}: the features of mpjax have {encode(value)} here")
    if rest:
        listed = ", ".join(f"{key} {encode(value)}" for key, value in rest.items())
        raise UsageError(
            f"{file}: mpjax does not know {listed}: features without it may be others; if it changes none, remove it"
        )
    if settings.rate != FeatureSettings().rate:
        raise UsageError(f"{file}: sampling_rate is {settings.rate}: mpjax has mel bins of 0 to 8000 Hz of 16000 alone")
    if settings.samples % settings.hop or settings.window % 2:
        raise UsageError(
            f"{file}: hop_length {settings.hop} has to divide a sound, and n_fft {settings.window} be even"
        )
    return settings
