"""Turns tokens into text as they arrive: whole characters, and nothing that may become a stop string."""

from collections.abc import Sequence

from mpjax.data.text.plain_tokenizers import Tokenizer


_BROKEN = "\ufffd"


class Written:
    """The text behind a prompt, of which each token may add a piece.

    A character of several tokens is held back until it is complete, and so is the beginning of a stop string.

    Attributes:
      stopped: whether a stop string has appeared. The text ends before it.

    Args:
      tokenizer: the tokenizer.
      prompt: the tokens of the prompt.
      stop: the stop strings; none is empty.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Whole characters that are decoded again with the new tokens: a word without one before it may lose its space.
        self._context = [int(token) for token in prompt]
        self._new: list[int] = []
        self._held = ""

    def add(self, token: int) -> str:
        """Takes the next token and returns what is certain of the text since the last call; nothing behind a stop."""
        self._new.append(int(token))
        return self._given(self._decoded(hold=True), last=False)

    def end(self) -> str:
        """Returns the rest of the text, with U+FFFD for bytes that are no character."""
        return self._given(self._decoded(hold=False), last=True)

    def _decoded(self, *, hold: bool) -> str:
        """The text of the new tokens, or nothing while it ends in the middle of a character."""
        before = self._tokenizer.text_of(self._context)
        after = self._tokenizer.text_of(self._context + self._new)
        if hold and after.endswith(_BROKEN):
            return ""
        piece = after[len(before) :]
        self._context = self._new if piece else self._context + self._new
        self._new = []
        return piece

    def _given(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        if positions := [position for stop in self._stop if (position := text.find(stop)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(positions)]
        beginning = 0 if last else max((_common(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - beginning :]
        return text[: len(text) - beginning]


def _common(text: str, stop: str) -> int:
    """The number of characters at the end of a text that are the beginning of a stop string, but not all of it."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
