"""The tokens around the text of a sound: what a folder of Whisper says that texts begin with, and never have.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022 (arXiv:2212.04356), section 2.3.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.tokenizers import HuggingFaceTokenizer, find_tokenizer
from mpjax.errors import UsageError
from mpjax.strict_json import encode


GENERATION = "generation_config.json"

_START = "<|startoftranscript|>"
_PLAIN_TEXT = "<|notimestamps|>"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


def prompt_of(name: str, tokenizer: Tokenizer, language: str) -> list[int]:
    """Finds the tokens that every text begins with, behind the one that the decoder reads first.

    They are the language, the task and `<|notimestamps|>`; the last alone, if the model has one language. A tokenizer
    without `<|startoftranscript|>` has none of them.

    Args:
      name: the `--data.tokenizer`.
      tokenizer: it.
      language: the `--data.language`, such as `en`; empty: that of the folder's generation_config.json.

    Raises:
      UsageError: a model of several languages has none, there is no such language, or the file and the tokenizer
        disagree.
    """
    known = tokenizer.tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if known is None or known.token_to_id(_START) is None:
        if language:
            raise UsageError(
                f"--data.language {language}: the tokenizer {name} has no tokens of languages; leave it out"
            )
        return []
    path = find_tokenizer(name)
    file = (path if path.is_dir() else path.parent) / GENERATION
    config = _read(file) if file.is_file() else {}

    def number(text: str, said: Any, key: str) -> int:
        token = known.token_to_id(text)
        if token is None:
            raise UsageError(f"tokenizer {name} has no token {text}, with which the texts of a Whisper begin")
        if said is not None and said != token:
            raise UsageError(f"{file}: {key} says {encode(said)} for {text}, and the tokenizer {token}")
        return token

    last = number(_PLAIN_TEXT, config.get("no_timestamps_token_id"), "no_timestamps_token_id")
    spoken = str(language or config.get("language") or "").removeprefix("<|").removesuffix("|>")
    # OpenAI's models of English alone have one token less.
    if not config.get("is_multilingual", tokenizer.vocabulary >= 51_865):
        if spoken not in ("", "en"):
            raise UsageError(f"--data.language {spoken}: the model of {name} knows English alone; leave it out")
        return [last]
    names = sorted(found[1] for text in known.get_vocab() if (found := _LANGUAGE.fullmatch(text)))
    if spoken not in names:
        fault = f"--data.language {spoken}: there is no such language" if spoken else "the model has several languages"
        raise UsageError(f"{fault}; write --data.language with that of the texts: {', '.join(names)}")
    task = config.get("task") or "transcribe"
    of_languages, of_tasks = config.get("lang_to_id") or {}, config.get("task_to_id") or {}
    return [
        number(f"<|{spoken}|>", of_languages.get(f"<|{spoken}|>"), "lang_to_id"),
        number(f"<|{task}|>", of_tasks.get(task), "task_to_id"),
        last,
    ]


def suppressed_in(folder: pathlib.Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads the tokens that a model never writes, and those that no text begins with.

    They are `suppress_tokens` and `begin_suppress_tokens` of generation_config.json, or of config.json without it.

    Raises:
      UsageError: the file is damaged, or has no lists of tokens.
    """
    files = [file for name in (GENERATION, "config.json") if (file := folder / name).is_file()]
    if not files:
        return (), ()
    config = _read(files[0])

    def tokens(key: str) -> tuple[int, ...]:
        value = config.get(key) or []
        if not (isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)):
            raise UsageError(f"{files[0]}: {key} is {encode(value)}: wanted a list of tokens")
        return tuple(value)

    return tokens("suppress_tokens"), tokens("begin_suppress_tokens")


def _read(file: pathlib.Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({error}); fetch it again") from error
    if not isinstance(config, Mapping):
        raise UsageError(f"{file}: wanted a JSON object")
    return config
