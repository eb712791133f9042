"""Waveforms of wav and flac files: the same numbers from every format, and errors that name the file."""

import sys

import numpy as np
import pytest
import soundfile

from mpjax.data.audio import FeatureSettings, read_waveform
from mpjax.errors import UsageError


SECOND = FeatureSettings(seconds=1)
STEPS = np.random.default_rng(0).integers(-(2**15), 2**15, 4000) / 2**15
"""Samples that 16 bits hold exactly."""


@pytest.mark.parametrize(
    ("name", "subtype"),
    [
        ("a.wav", "PCM_16"),
        ("a.wav", "PCM_24"),
        ("a.wav", "PCM_32"),
        ("a.wav", "FLOAT"),
        ("a.wav", "DOUBLE"),
        ("a.flac", "PCM_16"),
        ("a.flac", "PCM_24"),
    ],
)
def test_every_format_gives_the_same_numbers(tmp_path, name, subtype):
    soundfile.write(tmp_path / name, STEPS, 16_000, subtype=subtype)
    assert np.array_equal(read_waveform(str(tmp_path / name), SECOND), STEPS)


def test_channels_are_averaged(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.stack([STEPS, np.zeros_like(STEPS)], axis=1), 16_000)
    assert np.array_equal(read_waveform(str(tmp_path / "a.wav"), SECOND), STEPS / 2)


@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_other_rates_are_resampled_through_a_filter(tmp_path, rate):
    def sines(rate, *tones):
        return sum(0.3 * np.sin(2 * np.pi * tone * np.arange(rate) / rate) for tone in tones)

    high = [9500] if rate > 16_000 else []  # above half the rate of Whisper: it would be heard as 6500 Hz
    soundfile.write(tmp_path / "a.wav", sines(rate, 440, *high), rate, subtype="FLOAT")
    waveform = read_waveform(str(tmp_path / "a.wav"), SECOND)
    assert len(waveform) == 16_000
    inside = slice(500, -500)
    np.testing.assert_allclose(waveform[inside], sines(16_000, 440)[inside], atol=2e-3)


def wav(path, waveform=STEPS, rate=16_000, **options):
    soundfile.write(path, waveform, rate, **options)
    return path.read_bytes()


def test_damaged_files_are_errors_that_name_them(tmp_path):
    whole = wav(tmp_path / "a.wav")
    packed = wav(tmp_path / "a.flac")
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 1
    cases = {
        "half.wav": (whole[:2000], "cut short: its header says 8000 bytes of samples, and 1956 are there"),
        "head.wav": (whole[:44], "cut short"),
        "half.flac": (packed[: len(packed) // 2], "damaged"),
        "bit.flac": (bytes(flipped), "damaged"),
        "none.wav": (b"", "not a wav or flac file that can be read"),
        "text.wav": (b"hello", "not a wav or flac file that can be read"),
    }
    for name, (content, says) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"{name}: {says}"):
            read_waveform(str(tmp_path / name), SECOND)


@pytest.mark.parametrize(
    ("waveform", "options", "says"),
    [
        (np.zeros(0), {}, "has no samples"),
        (np.zeros(16_001), {}, "1.00 s long; wanted at most 1 s"),
        (np.zeros(16_001), {"rate": 8000}, "2.00 s long; wanted at most 1 s"),
        (np.array([0, np.nan, 0]), {"subtype": "FLOAT"}, r"sample 1 is \[nan\]"),
        (np.array([0, 0, np.inf]), {"subtype": "FLOAT"}, r"sample 2 is \[inf\]"),
        (np.array([0.0, 20_000.0]), {"subtype": "FLOAT"}, "floats of up to 20000, and full scale is 1"),
        (STEPS, {"format": "AIFF"}, "a file of AIFF .*; wanted wav or flac"),
    ],
)
def test_what_is_no_sound_for_the_model_is_an_error(tmp_path, waveform, options, says):
    wav(tmp_path / "a.wav", waveform, **options)
    with pytest.raises(UsageError, match=f"a.wav: {says}"):
        read_waveform(str(tmp_path / "a.wav"), SECOND)


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UsageError, match=r"need soundfile and scipy .*; write: pip install 'mpjax\[audio\]'"):
        read_waveform(str(tmp_path / "a.wav"), SECOND)


def test_channels_that_cancel_each_other_are_an_error(tmp_path):
    wav(tmp_path / "a.wav", np.stack([STEPS, -STEPS], axis=1))
    with pytest.raises(UsageError, match=r"a\.wav: its channels cancel each other, and their mean is silence"):
        read_waveform(str(tmp_path / "a.wav"), FeatureSettings())


@pytest.mark.parametrize(("container", "endian"), [("RF64", "FILE"), ("WAV", "BIG"), ("WAV", "LITTLE")])
def test_a_wav_of_any_kind_that_is_cut_short_is_an_error(tmp_path, container, endian):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.linspace(-1, 1, 4000), 16_000, format=container, endian=endian, subtype="PCM_16")
    assert len(read_waveform(str(path), FeatureSettings())) == 4000
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"a\.wav: cut short: its header says 8000 bytes of samples"):
        read_waveform(str(path), FeatureSettings())


def test_a_flac_file_that_does_not_say_how_long_it_is_is_an_error(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, STEPS, 16_000)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0  # of the 36 bits with the number of samples
    content[22:26] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.flac: its header does not say how long it is"):
        read_waveform(str(path), FeatureSettings())
