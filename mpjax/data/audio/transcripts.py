"""Tokenizes the texts of sounds, with what every text begins with, and its end."""

from collections.abc import Sequence

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.audio.speech_tokens import prompt_of
from mpjax.data.fields import Field, Numbers, Tokens
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


TARGET, ANSWERS = "target_tokens", "answers"


class Transcriber:
    """Turns the texts of sounds into tokens: the prompt, the text and the end.

    Args:
      config: the `tokenizer`, the `language` and the `length` of the settings.

    Raises:
      UsageError: as `load_tokenizer` and `prompt_of`, or `length` leaves a text no token.
    """

    def __init__(self, config: Data):
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer)
        self.prompt = prompt_of(config.tokenizer, self.tokenizer, config.language)
        self.length = config.length
        if self.length < (least := len(self.prompt) + 2):
            raise UsageError(
                f"--data.length {self.length}: wanted at least {least}: {least - 1} tokens are not of a text"
            )

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a text."""
        tokens = Tokens(self.length, self.tokenizer.vocabulary)
        return {TARGET: tokens, ANSWERS: Numbers((self.length,), np.dtype(bool))}

    def encoded(self, texts: Sequence[str], split: str, notes: list[str]) -> dict[str, np.ndarray]:
        """Encodes texts as `target_tokens`, int32 [N, length], and `answers`, bool [N, length], True where it counts.

        What counts is the text and its end. A text that is too long is cut, and has no end: `notes` get a sentence.
        """
        values, lengths = self.tokenizer.whole(texts)
        tokens = np.full((len(texts), self.length), self.tokenizer.padding, np.int32)
        answers, begin, cut = np.zeros(tokens.shape, bool), len(self.prompt), 0
        tokens[:, :begin] = self.prompt
        for row, (end, size) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
            text = np.append(values[end - size : end], self.tokenizer.end)[: self.length - begin]
            cut += size + 1 > len(text)
            tokens[row, begin : begin + len(text)] = text
            answers[row, begin : begin + len(text)] = True
        if cut:
            notes.append(
                f"{split}: {cut:,} of {len(texts):,} texts have more than {self.length} tokens with "
                f"{begin + 1} of prompt and end, and are cut, without an end (--data.length {self.length})"
            )
        return {TARGET: tokens, ANSWERS: answers}
