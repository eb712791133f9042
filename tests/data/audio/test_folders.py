"""Folders of wav and flac files: with a table of texts, or a folder for each class."""

import json

import numpy as np
import pytest
import soundfile

from mpjax.config import Data
from mpjax.data import open_source
from mpjax.data.audio import FeatureSettings, log_mels, read_waveform
from mpjax.errors import UsageError


TINY = {"chunk_length": 1, "feature_extractor_type": "WhisperFeatureExtractor"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(TINY))
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def sound(path, rate=16_000, channels=1, length=800):
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.3 * np.sin(np.arange(length) * len(path.stem) / 7)
    soundfile.write(path, np.stack([tone] * channels, axis=1), rate)


def opened(folder, task="transcription", **settings):
    usual = {"tokenizer": "bytes", "train_split": "train", "test_split": "train"}
    usual |= {"length": 6} if task == "transcription" else {}
    usual |= {"name": f"folder:{folder}", "features": str(folder.parent / "model")}
    return open_source(Data(**usual | settings), folder, task)


def table(folder, *rows, name="metadata.csv"):
    (folder / name).write_text("\n".join(rows) + "\n")


def test_texts_of_a_table_become_tokens_with_an_end_that_alone_count(folder):
    for name in ("a.wav", "b.flac", "inner/c.wav"):
        sound(folder / name)
    table(folder, "file_name,text,who", "a.wav,hi,x", "b.flac,long text,y", 'inner/c.wav,"o,k",z')
    source = opened(folder)
    assert [path.rpartition("set/")[2] for path in source.places] == ["b.flac", "a.wav", "inner/c.wav"]
    example = source.train[1]
    assert example["target_tokens"].tolist() == [107, 108, 1, 0, 0, 0]
    assert example["answers"].tolist() == [True] * 3 + [False] * 3
    settings = FeatureSettings(seconds=1)
    assert np.array_equal(example["sound"], log_mels(read_waveform(str(folder / "a.wav"), settings), settings))
    cut = source.train[0]  # without an end, which would teach to stop there
    assert cut["target_tokens"].tolist() == [111, 114, 113, 106, 35, 119]
    assert cut["answers"].all()
    assert [note for note in source.notes if "cut" in note] == [
        "train: 1 of 3 texts have more than 6 tokens with 1 of prompt and end, and are cut, without an end "
        "(--data.length 6)"
    ]


def test_what_is_changed_or_left_out_is_told(folder):
    sound(folder / "a.wav", rate=8000)
    sound(folder / "bb.wav", rate=44_100, channels=2)
    for name in ("c.wav", "d.wav"):
        sound(folder / name)
    rows = [{"file_name": "a.wav", "transcription": "a"}, {"file_name": "bb.wav", "transcription": "b"}]
    rows.append({"file_name": "c.wav", "transcription": " "})
    table(folder, *map(json.dumps, rows), name="metadata.jsonl")
    assert opened(folder).notes == (
        f"train: 1 sounds in {folder} have no row in metadata.jsonl and are left out",
        "train: 1 of 3 sounds have no text and are left out",
        "train: 2 of 2 sounds are resampled to 16,000 Hz, from 8,000 Hz, 44,100 Hz",
        "train: of 1 of 2 sounds, the mean of the channels is taken",
    )


def test_splits_are_folders_or_parts(folder):
    for split, count in (("train", 4), ("test", 2)):
        for number in range(count):
            sound(folder / split / f"{number}.wav")
        table(folder / split, "file_name,said", *(f"{number}.wav,{split}" for number in range(count)))
    source = opened(folder, test_split="test", columns={"text": "said"})
    assert (len(source.train), len(source.test)) == (4, 2)
    parts = opened(
        folder / "train",
        train_split="train[:75%]",
        test_split="train[75%:]",
        columns={"text": "said"},
        features="whisper",
    )
    assert (len(parts.train), len(parts.test)) == (3, 1)
    with pytest.raises(UsageError, match="has no split 'dev': there is no folder"):
        opened(folder, test_split="dev")


def test_folders_of_classes_are_labels(folder):
    for name in ("no/a.wav", "no/b.flac", "yes/c.wav"):
        sound(folder / name)
    source = opened(folder, "audio_classification")
    assert source.fields["label"].names == ("no", "yes")
    assert sorted(int(source.train[number]["label"]) for number in range(3)) == [0, 0, 1]
    assert source.train[0]["sound"].shape == (100, 80)
    (folder / "no" / "d.mp3").write_bytes(b"")
    with pytest.raises(UsageError, match=r"d.mp3: not a wav or flac file by its extension"):
        opened(folder, "audio_classification")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["file_name,text", "a.wav,hi", "b.wav,ho"], "there is no .*b.wav .1 of 2 files are missing"),
        (["file_name,text", "a.wav,hi", "a.wav,ho"], "lines 2 and 3: both are of a.wav"),
        (["file_name,text", "a.wav,hi", "./a.wav,ho"], "lines 2 and 3: both are of a.wav"),
        (["file_name,text", "a.wav,hi,ho"], "line 2: 3 cells, and the first line has 2"),
        (["name,text", "a.wav,hi"], "its first line is name,text; wanted names of columns"),
        (
            ["file_name,said", "a.wav,hi"],
            "no column text or transcription .* it has said beside file_name; write --data.col",
        ),
        (["file_name,text", "../a.wav,hi"], "line 2: file_name ../a.wav: wanted a path below"),
        (["file_name,text", "a.wav,"], "no row has a text in the column text"),
        (["file_name,text"], "has no rows"),
        (["file_name,text", 'a.wav,"hi'], "line 2: unexpected end of data"),
    ],
)
def test_a_table_that_does_not_fit_is_an_error(folder, rows, says):
    sound(folder / "a.wav")
    table(folder, *rows)
    with pytest.raises(UsageError, match=says):
        opened(folder)


def test_a_damaged_file_is_found_when_the_set_is_opened(folder):
    sound(folder / "a.wav")
    (folder / "b.wav").write_bytes(b"no sound")
    table(folder, "file_name,text", "a.wav,hi", "b.wav,ho")
    with pytest.raises(UsageError, match="b.wav: not a wav or flac file that can be read"):
        opened(folder)


def test_other_data_and_settings_are_errors(folder):
    with pytest.raises(UsageError, match="no metadata.csv and no metadata.jsonl .* write --task audio_classification"):
        opened(folder)
    sound(folder / "a.wav")
    table(folder, "file_name,text", "a.wav,hi")
    with pytest.raises(UsageError, match="--data.preprocess a.py:b has no meaning for a folder of sounds"):
        opened(folder, preprocess="a.py:b")
    with pytest.raises(UsageError, match="--data.length 1: wanted at least 2"):
        opened(folder, length=1)
    with pytest.raises(UsageError, match="--data.language en: the tokenizer bytes has no tokens of languages"):
        opened(folder, language="en")
    with pytest.raises(UsageError, match="wanted a folder of wav or flac files, --data.name folder:PATH"):
        open_source(Data(name="digits"), folder, "transcription")


def test_the_rows_of_jsonl_end_at_line_feeds_alone(folder):
    sound(folder / "a.wav")
    row = {"file_name": "a.wav", "text": "a\u2028b"}
    table(folder, json.dumps(row, ensure_ascii=False), name="metadata.jsonl")
    assert len(opened(folder).train) == 1
