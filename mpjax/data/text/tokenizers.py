"""Loads the tokenizer that `--data.tokenizer` names: one that needs no files, or one of Hugging Face."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.paths import expanded
from mpjax.data.text.plain_tokenizers import BytesTokenizer, Ragged, Tokenizer, WordsTokenizer
from mpjax.errors import UsageError, reason_of
from mpjax.strict_json import encode


PLAIN = {"bytes": BytesTokenizer, "words": WordsTokenizer, "auto": BytesTokenizer}
_USUAL_PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_USUAL_END = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<sep>")
_TOKENIZER_FILES = ("tokenizer*", "chat_template.jinja", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")
_OF_SOUNDS = ("preprocessor_config.json", "processor_config.json", "generation_config.json")
"""The files beside a tokenizer that say how sounds are read, and with what their texts begin."""

_CONFIG = "tokenizer_config.json"
_OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""The settings of a tokenizer of BERT in transformers, and what its normalizer calls them."""

_INSTALL = "write: pip install 'mpjax[hf]'; or --data.tokenizer bytes"


@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A `Tokenizer` that wraps one of the `tokenizers` package, which uses all cores.

    Args:
      name: the name in messages.
      tokenizer: a `tokenizers.Tokenizer`, whose settings of truncation and padding are changed in place.
      special: the token ids of `padding` and `end`; None for a token that the tokenizer lacks.
    """

    name: str
    tokenizer: Any
    special: Mapping[str, int | None]

    @property
    def vocabulary(self) -> int:
        """The largest token id, of all tokens with the added ones, plus 1."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def padding(self) -> int:
        """The id of the padding token, or of `end` if there is none (GPT-2). Raises UsageError if both are missing."""
        return self.end if (padding := self.special["padding"]) is None else padding

    @property
    def end(self) -> int:
        """The id of the end-of-text token. Raises UsageError if the tokenizer has none."""
        if (end := self.special["end"]) is None:
            raise UsageError(
                f"tokenizer {self.name} has no end-of-text token; wanted one of {', '.join(_USUAL_END)}, or eos_token "
                "in a tokenizer_config.json beside it"
            )
        return end

    def whole(self, texts: Sequence[str]) -> Ragged:
        """Tokenizes each text in full, without special tokens."""
        self.tokenizer.no_truncation()
        return self._encoded(texts, special=False)

    def framed(self, texts: Sequence[str], length: int) -> Ragged:
        """Tokenizes each text with the special tokens of a single text, such as [CLS] text [SEP], without padding.

        The text is truncated, so that there are at most `length` tokens with the special ones. Raises UsageError if
        that leaves the text no token.
        """
        if length <= (added := self.tokenizer.num_special_tokens_to_add(False)):
            raise UsageError(
                f"--data.length {length}: wanted at least {added + 1}: the tokenizer {self.name} adds {added} tokens"
            )
        self.tokenizer.enable_truncation(length)
        return self._encoded(texts, special=True)

    def with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Tokenizes each text in full, with special tokens only where the text has theirs.

        Returns the tokens of each text, and where each begins and ends in it, by characters, with its spaces.
        """
        import tokenizers

        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        after = self.tokenizer.post_processor
        # Those of Llama 3 and GPT-2 leave spaces out of places: a token of spaces would begin where it ends.
        self.tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        try:
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self.tokenizer.post_processor = after
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones, and with U+FFFD for unknown tokens and broken characters."""
        known = [[]]
        for token in map(int, tokens):
            if self.tokenizer.id_to_token(token) is None:  # a model may have more tokens than its tokenizer
                known.append([])
            else:
                known[-1].append(token)
        return "\ufffd".join(self.tokenizer.decode(ids, skip_special_tokens=True) for ids in known)

    def _encoded(self, texts: Sequence[str], *, special: bool) -> Ragged:
        self.tokenizer.no_padding()
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]
        values = np.fromiter(itertools.chain.from_iterable(ids), np.int32)
        return Ragged(values, np.fromiter(map(len, ids), np.int64, len(ids)))


def load_tokenizer(name: str) -> Tokenizer:
    """Loads the tokenizer `name`; one on the Hugging Face hub is downloaded, unless the local cache has it.

    Args:
      name: `bytes`, `words`, `auto` (the same as `bytes` here), the path of a tokenizer.json, a folder with that file
        or the files of a `transformers` tokenizer, or a name on the Hugging Face hub. An existing path takes precedence
        over a name on the hub.

    Raises:
      UsageError: the tokenizer does not exist or is damaged, or the package that reads it is missing.
    """
    if name in PLAIN:
        return PLAIN[name]()
    path = find_tokenizer(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    return _from_file(file, name) if file.exists() else _from_transformers(path, name)


def find_tokenizer(name: str, *, flag: str = "--data.tokenizer") -> pathlib.Path:
    """Finds the files of a tokenizer of Hugging Face, which the setting `flag` names: a folder, or a tokenizer.json.

    Raises:
      UsageError: there is none, or it cannot be downloaded.
    """
    path = expanded(name)
    if not path.exists():
        if name.startswith(("/", "~", ".")) or path.suffix == ".json":
            raise UsageError(f"{flag} {name}: nothing at {path}; wanted a tokenizer.json or a folder with one")
        path = _downloaded(name, flag)
    return path


def _from_file(file: pathlib.Path, name: str) -> HuggingFaceTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(f"--data.tokenizer {name} needs the package tokenizers ({error}); {_INSTALL}") from error
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no narrower exception
        raise UsageError(f"--data.tokenizer {name}: {file} cannot be read: {error}; wanted a tokenizer.json") from error
    beside = _settings_beside(file)
    if isinstance(tokenizer.normalizer, tokenizers.normalizers.BertNormalizer):
        _check_normalizer(file, tokenizer.normalizer, beside[-1])
    tokens = _named(beside)
    padding = (
        tokenizer.token_to_id(tokens["pad_token"]) if "pad_token" in tokens else (tokenizer.padding or {}).get("pad_id")
    )
    end = next((tokenizer.token_to_id(tokens[key]) for key in ("eos_token", "sep_token") if key in tokens), None)
    special = {
        "padding": _first(tokenizer, _USUAL_PADDING) if padding is None else padding,
        "end": _first(tokenizer, _USUAL_END) if end is None else end,
    }
    return HuggingFaceTokenizer(name, tokenizer, special)


def _settings_beside(file: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the files next to a tokenizer.json, the last of which overrides the first; a missing one is empty.

    A damaged file is a UsageError.
    """
    read = []
    for path in (file.parent / "special_tokens_map.json", file.parent / _CONFIG):
        settings: Any = {}
        if path.exists():
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(settings, dict):
                    raise ValueError("not a JSON object")
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path} is damaged ({error}); fetch it again, or remove it") from error
        read.append(settings)
    return read


def _named(beside: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The texts of `pad_token`, `eos_token` and `sep_token`, where set."""
    tokens: dict[str, str] = {}
    for settings in beside:
        for key in ("pad_token", "eos_token", "sep_token"):
            token = settings.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            tokens |= {key: token} if token and isinstance(token, str) else {}
    return tokens


def _check_normalizer(file: pathlib.Path, normalizer: Any, settings: Mapping[str, Any]) -> None:
    """Raises UsageError if transformers would change the normalizer of BERT by the settings next to its file."""
    if str(settings.get("tokenizer_class", "")).startswith("PreTrainedTokenizer"):
        return  # of a class without such settings
    for key, name in _OF_BERT.items():
        value = getattr(normalizer, name)
        if key in settings and settings[key] != value:
            raise UsageError(
                f"{file.parent / _CONFIG} says {key} {encode(settings[key])}, and the normalizer of {file} has {name} "
                f"{encode(value)}: transformers follows the first, so texts would have other tokens than there; write "
                "the same in both"
            )


def _first(tokenizer: Any, names: Sequence[str]) -> int | None:
    return next((number for name in names if (number := tokenizer.token_to_id(name)) is not None), None)


_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")
"""Patterns of the files of tokenizers."""


def _from_transformers(folder: pathlib.Path, name: str) -> HuggingFaceTokenizer:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"--data.tokenizer {name}: {folder} has no tokenizer.json, and reading other files needs the package "
            f"transformers ({error}); write: pip install transformers"
        ) from error
    if not any(file for pattern in _FILES for file in folder.glob(pattern)):
        raise UsageError(  # transformers makes an empty tokenizer from config.json alone
            f"--data.tokenizer {name}: {folder} has no files of a tokenizer; write --data.tokenizer FOLDER, where they "
            "are"
        )
    try:
        loaded: Any = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer = loaded.backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--data.tokenizer {name}: {error}; wanted a folder with a tokenizer.json") from error
    special = {
        "padding": loaded.pad_token_id,
        "end": loaded.sep_token_id if loaded.eos_token_id is None else loaded.eos_token_id,
    }
    return HuggingFaceTokenizer(name, tokenizer, special)


def _downloaded(name: str, flag: str) -> pathlib.Path:
    """Downloads the files of the tokenizer `name` from the Hugging Face hub, unless the local cache has them.

    It returns the folder of the files in the cache.

    Raises:
      UsageError: the package huggingface_hub is missing, or the hub cannot be reached or has no such name.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            f"{flag} {name}: no file or folder of that name, and the hub needs the package huggingface_hub "
            f"({error}); {_INSTALL}"
        ) from error
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=[*_TOKENIZER_FILES, *_OF_SOUNDS]))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {name}: no file or folder of that name, and the Hugging Face hub did not provide it: "
            f"{reason_of(error)}; copy its files here and write {flag} FOLDER, or --data.tokenizer bytes"
        ) from error
