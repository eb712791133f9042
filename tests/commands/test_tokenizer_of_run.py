"""A checkpoint knows the files of its tokenizer: others are told of."""

import warnings

import pytest

from mpjax.commands import compare_tokenizer, digests_of_tokenizer
from mpjax.config import Data
from mpjax.errors import CheckpointWarning


def test_a_file_that_has_changed_or_appeared_is_told_of(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    data = Data(tokenizer=str(tmp_path))
    before = digests_of_tokenizer(data)
    assert before == {"tokenizer.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_tokenizer(data, before)
        compare_tokenizer(Data(tokenizer=str(tmp_path / "tokenizer.json")), before)
    (tmp_path / "tokenizer.json").write_text("{ }")
    (tmp_path / "chat_template.jinja").write_text("")
    with pytest.warns(CheckpointWarning, match=r"checkpoint \(changed: tokenizer.json, chat_template.jinja\)"):
        compare_tokenizer(data, before)


def test_a_tokenizer_without_files_has_no_digests():
    assert digests_of_tokenizer(Data(tokenizer="bytes")) == {}
