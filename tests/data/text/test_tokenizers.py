import json
import subprocess
import sys

import pytest

from mpjax.data.text import BytesTokenizer, load_tokenizer
from mpjax.errors import UsageError


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "half", "precision", "is", "enough"]


@pytest.fixture
def bert(tmp_path):
    """A folder with a tokenizer.json whose words are `WORDS`."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def gpt2(tmp_path):
    """A folder with a tokenizer.json without padding: letters and an end."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, "b"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def lists(ragged):
    """One list per text."""
    values = iter(ragged.values.tolist())
    return [[next(values) for _ in range(length)] for length in ragged.lengths]


def test_bytes_come_after_three_special_tokens():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.padding, tokenizer.end) == (259, 0, 1)
    assert lists(tokenizer.whole(["aé", "", "\n"])) == [[100, 198, 172], [], [13]]


def test_bytes_are_framed_and_cut():
    tokenizer = BytesTokenizer()
    assert lists(tokenizer.framed(["abc", "", "abcdef", "éa"], 5)) == [
        [2, 100, 101, 102, 1],
        [2, 1],
        [2, 100, 101, 102, 1],
        [2, 198, 172, 100, 1],
    ]
    with pytest.raises(UsageError, match="--data.length 2: wanted at least 3"):
        tokenizer.framed(["a"], 2)


@pytest.mark.extra
def test_a_tokenizer_frames_and_cuts_as_it_is_made_to(bert):
    tokenizer = load_tokenizer(str(bert))
    assert (tokenizer.vocabulary, tokenizer.padding) == (8, 0)
    assert lists(tokenizer.framed(["half precision", "half half half half", "float"], 5)) == [
        [2, 4, 5, 3],
        [2, 4, 4, 4, 3],
        [2, 1, 3],
    ]
    assert lists(tokenizer.whole(["half precision is enough half half"])) == [[4, 5, 6, 7, 4, 4]]
    with pytest.raises(UsageError, match="--data.length 2: wanted at least 3: the tokenizer .* adds 2 tokens"):
        tokenizer.framed(["half"], 2)


@pytest.mark.extra
def test_the_file_alone_will_do(bert):
    assert load_tokenizer(str(bert / "tokenizer.json")).vocabulary == 8


@pytest.mark.extra
def test_end_of_text_by_its_usual_name(bert, gpt2):
    assert load_tokenizer(str(gpt2)).end == 2


@pytest.mark.extra
def test_without_padding_the_end_serves(gpt2):
    assert load_tokenizer(str(gpt2)).padding == 2


@pytest.mark.parametrize("token", ["b", {"content": "b"}])
@pytest.mark.extra
def test_the_files_beside_say_which_tokens_are_special(gpt2, token):
    (gpt2 / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, "pad_token": "a"}))
    tokenizer = load_tokenizer(str(gpt2))
    assert (tokenizer.padding, tokenizer.end) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"do_lower_case": True, "strip_accents": None}, None),
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"do_lower_case": False}, "says do_lower_case false, and the normalizer of .* has lowercase true"),
        ({"strip_accents": False}, "says strip_accents false, and the normalizer of .* has strip_accents null"),
    ],
)
@pytest.mark.extra
def test_files_that_say_two_things_of_a_normalizer_are_refused(bert, settings, says):
    """transformers would follow the second file, and tokenize other texts."""
    file = str(bert / "tokenizer.json")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.save(file)
    (bert / "tokenizer_config.json").write_text(json.dumps(settings))
    if says is None:
        assert lists(load_tokenizer(file).framed(["HALF"], 3)) == [[2, 4, 3]]
    else:
        with pytest.raises(UsageError, match=says):
            load_tokenizer(file)


@pytest.mark.extra
def test_a_tokenizer_without_an_end(gpt2):
    file = gpt2 / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "c"))
    with pytest.raises(UsageError, match="no end-of-text token; wanted one of .*eos_token in a tokenizer_config.json"):
        _ = load_tokenizer(str(file)).end


@pytest.mark.filterwarnings("default")  # what transformers says when it is imported
@pytest.mark.extra
def test_files_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "[MASK]"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.vocabulary, tokenizer.padding, tokenizer.end) == (9, 0, 3)
    assert lists(tokenizer.framed(["Half precision"], 9)) == [[2, 4, 5, 3]]


@pytest.mark.parametrize("name", ["/no/such", "./no", "no.json"])
def test_nothing_there(name):
    with pytest.raises(UsageError, match=f"--data.tokenizer {name}: nothing at .*; wanted a tokenizer.json"):
        load_tokenizer(name)


@pytest.mark.extra
def test_a_file_that_is_none(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read: .*; wanted a tokenizer.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.extra
def test_no_network(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def download(name, **_):
        raise hub.errors.LocalEntryNotFoundError("cannot reach it")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(UsageError, match="--data.tokenizer bert-base: no file or folder of that name.*cannot reach it"):
        load_tokenizer("bert-base")


@pytest.mark.extra
def test_from_the_hub(bert, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(bert))
    assert load_tokenizer("owner/name").vocabulary == 8


@pytest.mark.slow
def test_without_the_packages(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    code = "import sys\nsys.modules |= dict.fromkeys(['tokenizers', 'huggingface_hub'])\n"
    code += "from mpjax.data.text.tokenizers import load_tokenizer\nload_tokenizer('bytes')\n"
    code += f"for name in ({str(tmp_path)!r}, 'owner/name'):\n    try: load_tokenizer(name)\n"
    code += "    except ValueError as error: print(error)"
    first, second = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert "needs the package tokenizers" in first
    assert "needs the package huggingface_hub" in second
    assert "write: pip install 'mpjax[hf]'; or --data.tokenizer bytes" in first


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
@pytest.mark.extra
def test_a_damaged_file_beside_a_tokenizer_is_named(tmp_path, content):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer_config.json is damaged \(.*\); fetch it again, or remove it"):
        load_tokenizer(str(tmp_path))


@pytest.mark.extra
def test_a_folder_without_files_of_a_tokenizer_is_an_error(tmp_path):
    """transformers makes an empty tokenizer of it, by its config.json alone."""
    pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match="has no files of a tokenizer; write --data.tokenizer FOLDER, where they are"):
        load_tokenizer(str(tmp_path))
