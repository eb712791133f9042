"""Log-mel features: those of Whisper's extractor in transformers, in float32, from settings that files may have."""

import json

import numpy as np
import pytest

from mpjax.data.audio import FeatureSettings, Sound, log_mels, read_features
from mpjax.errors import UsageError


TIMES = np.arange(16_000) / 16_000
SINE = 0.5 * np.sin(2 * np.pi * 440 * TIMES)
SECOND = FeatureSettings(seconds=1)


def test_a_sine_is_loud_in_its_bin_and_silence_is_eight_powers_of_ten_below():
    features = log_mels(SINE[:8000], SECOND)
    assert (features.shape, features.dtype) == ((100, 80), np.float32)
    assert int(features[20].argmax()) == 11  # of the bins of 37.2 Hz up to 1000 Hz, the one with 440 Hz in it
    assert features[20].max() == pytest.approx(1.4382, abs=1e-4)
    assert features[80].max() == features.min() == pytest.approx(features.max() - 2, abs=1e-6)


def test_silence_alone_is_no_error():
    assert np.array_equal(log_mels(np.zeros(16), SECOND), np.full((100, 80), -1.5, np.float32))


def test_a_longer_sound_is_an_error():
    with pytest.raises(UsageError, match="a sound of 16001 samples: wanted at most 16000"):
        log_mels(np.zeros(16_001), SECOND)


def write(folder, name="preprocessor_config.json", **settings):
    (folder / name).write_text(json.dumps(settings))
    return str(folder)


def test_settings_are_read_as_transformers_writes_them(tmp_path):
    old = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 20}
    old |= {"n_samples": 320_000, "nb_max_frames": 2000, "mel_filters": [[0.0]], "return_attention_mask": False}
    settings = read_features(write(tmp_path, **old))
    assert (settings.bins, settings.seconds, settings.frames) == (128, 20, 2000)
    (tmp_path / "preprocessor_config.json").unlink()
    new = {"feature_extractor": old, "processor_class": "WhisperProcessor"}
    assert read_features(write(tmp_path, "processor_config.json", **new)) == settings
    assert read_features("whisper") == FeatureSettings(bins=80, seconds=30, rate=16_000, window=400, hop=160)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"feature_extractor_type": "Wav2Vec2FeatureExtractor"},
            'feature_extractor_type is "Wav2Vec2FeatureExtractor"',
        ),
        ({"dither": 0.1}, "dither is 0.1: the features of mpjax have 0.0 here"),
        ({"do_normalize": True}, "do_normalize is true"),
        ({"padding_value": 1.0}, "padding_value is 1.0"),
        ({"n_samples": 1}, "n_samples is 1: the features of mpjax have 480000 here"),
        ({"sampling_rate": 8000}, "sampling_rate is 8000"),
        ({"feature_size": 0}, "feature_size is 0: wanted a whole number of at least 1"),
        ({"hop_length": 7}, "hop_length 7 has to divide a sound"),
        ({"fmax": 4000}, "mpjax does not know fmax 4000"),
    ],
)
def test_what_is_not_understood_is_an_error(tmp_path, settings, says):
    with pytest.raises(UsageError, match=says):
        read_features(write(tmp_path, **settings))


def test_a_folder_without_settings_is_an_error(tmp_path):
    with pytest.raises(
        UsageError, match=r"has no preprocessor_config.json; wanted the folder of a Whisper, or whisper"
    ):
        read_features(str(tmp_path))


def test_the_field_of_a_sound_takes_float32_and_refuses_what_is_narrower_or_not_finite():
    field, features = Sound(4, 2), np.zeros((3, 4, 2), np.float32)
    assert field.settle("sound", features) is features
    with pytest.raises(UsageError, match=r"sound: float16\[3, 4, 2\]; wanted log-mel features in float32, \[4, 2\]"):
        field.settle("sound", features.astype(np.float16))
    with pytest.raises(UsageError, match=r"float32\[3, 2, 4\]"):
        field.settle("sound", features.swapaxes(1, 2))
    features[0, 0, 0] = np.nan
    with pytest.raises(UsageError, match="a number is not finite"):
        field.settle("sound", features)


@pytest.mark.extra
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("bins", [80, 128])
def test_features_are_those_of_transformers(bins):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
    theirs = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=2)
    noise = np.random.default_rng(0).normal(size=16_000)
    for waveform in (SINE, 0.1 * noise * np.sin(TIMES), SINE[:5000] + 1e-4 * noise[:5000]):
        padded = np.pad(waveform, (0, 32_000 - len(waveform)))
        expected = theirs._np_extract_fbank_features(padded[None], "cpu")[0].T
        actual = log_mels(waveform, FeatureSettings(bins=bins, seconds=2))
        np.testing.assert_allclose(actual, expected, atol=1e-6)
        # Their transforms by PyTorch are in float32, which rounds quiet bins.
        rounded = theirs(waveform.astype(np.float32), sampling_rate=16_000, return_tensors="np").input_features[0].T
        np.testing.assert_allclose(actual, rounded, atol=3e-5)
