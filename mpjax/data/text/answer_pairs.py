"""Turns pairs of answers to one prompt, one of them preferred, into the tokens of two conversations."""

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples, Source
from mpjax.data.fields import Numbers, Tokens
from mpjax.data.table import Table
from mpjax.data.text.chat_template import ASSISTANT, Message
from mpjax.data.text.instructions import (
    Chat,
    Conversations,
    as_messages,
    checked_messages,
    load_chat,
    read_in_chunks,
    stored_rows,
    taken_as_special,
)
from mpjax.errors import UsageError


_SIDES = ("chosen", "rejected")
"""The columns of the preferred and of the other conversation; of answers, beside a column `prompt`."""


@dataclasses.dataclass(frozen=True)
class Preferences(Examples):
    """Examples with `tokens` and `answers` of the preferred conversation, and `rejected` and `rejected_answers`.

    They are as in `Conversations`.
    """

    chosen: Conversations
    rejected: Conversations

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        rejected = self.rejected[index]
        return {**self.chosen[index], "rejected": rejected["tokens"], "rejected_answers": rejected["answers"]}


def preferences(table: Table, config: Data) -> Source:
    """Tokenizes the pairs of both splits now, and holds the tokens in memory.

    A longer conversation is cut at its end. A pair is left out if one of its conversations has no token of an answer,
    perhaps because all are cut, or if both are the same. Answers to messages that both begin with are not marked.
    `Source.notes` say how many are cut or left out, and how many begin with different messages.

    Args:
      table: the stored set, with the columns `chosen` and `rejected`: conversations, or answers to a column `prompt`.
      config: `tokenizer`, `length`, `columns` and `preprocess`.

    Raises:
      UsageError: the set has no such columns, a conversation is none, the tokenizer or its template cannot be used
        (`load_chat`), or no pair of a split has two answers.
    """
    chat = load_chat(config.tokenizer)
    notes: list[str] = []
    has_prompt = config.preprocess or "prompt" in table.columns or "prompt" in config.columns
    splits = stored_rows(table, config, [("prompt", *_SIDES) if has_prompt else _SIDES])
    train, test = (_tokenized(rows, chat, config.length, split, notes) for rows, split in splits)
    tokens = Tokens(config.length + 1, chat.tokenizer.vocabulary)
    marks = Numbers((config.length + 1,), np.dtype(bool))
    fields = {"tokens": tokens, "answers": marks, "rejected": tokens, "rejected_answers": marks}
    return Source(table.name, fields, train, test, notes=tuple(dict.fromkeys(notes)))


def pair_of(example: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Reads the preferred and the rejected conversation of a stored example.

    Raises:
      UsageError: it has no `chosen` and `rejected`, or one of them with its `prompt` is no conversation.
    """
    if missing := [name for name in _SIDES if name not in example]:
        raise UsageError(f"{where} has {', '.join(example)} and no {missing[0]}; wanted chosen and rejected")
    prompt = example.get("prompt")
    if prompt is None:
        if text := next((name for name in _SIDES if isinstance(example[name], str)), None):
            raise UsageError(
                f"{where}: {text} is a text, and there is no `prompt` that it answers; write --data.columns prompt "
                "COLUMN, or give both as lists of messages"
            )
        return checked_messages(example["chosen"], where), checked_messages(example["rejected"], where)
    asked = as_messages(prompt, "user")
    chosen, rejected = (
        checked_messages([*asked, *as_messages(example[name], ASSISTANT)], f"{where}, {name}") for name in _SIDES
    )
    return chosen, rejected


def _tokenized(examples: Examples, chat: Chat, length: int, split: str, notes: list[str]) -> Preferences:
    sides: tuple[list, list] = ([], [])
    cut = empty = same = taken = apart = 0
    for pairs in read_in_chunks(examples, split, pair_of):
        talks = [*itertools.chain(*pairs)]
        special = chat.have_special(talks)
        taken += sum(map(operator.or_, special[::2], special[1::2]))
        counts = [_shared(pair) for pair in pairs]
        apart += counts.count(0)
        encoded = chat.marked(talks, [count for count in counts for _ in _SIDES])
        for pair in zip(encoded[::2], encoded[1::2], strict=True):
            cut += any(len(tokens) > length + 1 for tokens, _ in pair)
            whole = [(np.asarray(tokens[: length + 1], np.uint32), mark[: length + 1]) for tokens, mark in pair]
            if np.array_equal(whole[0][0], whole[1][0]):
                same += 1
            elif not all(mark[1:].any() for _, mark in whole):  # the first token is predicted from none
                empty += 1
            else:
                for side, conversation in zip(sides, whole, strict=True):
                    side.append(conversation)
    if cut or empty or same:
        notes.append(
            f"{split}: {cut:,} of {len(examples):,} pairs have more than {length + 1} tokens and are cut to them "
            f"(--data.length {length}); {empty:,} have no token of an answer in one of them, {same:,} are twice the "
            "same, and are left out"
        )
    if apart:
        notes.append(
            f"{split}: {apart:,} of {len(examples):,} pairs begin with two different messages, and so are no answers "
            "to one prompt; they are trained on nevertheless"
        )
    notes += taken_as_special(split, taken)
    if not sides[0]:
        raise UsageError(
            f"{split}: none of {len(examples):,} pairs has two different answers within {length + 1} tokens; write a "
            "larger --data.length, or look at the roles: answers are those of `assistant`"
        )
    chosen, rejected = (Conversations.of(side, length, chat.tokenizer) for side in sides)
    return Preferences(chosen, rejected)


def _shared(pair: tuple[Sequence[Message], Sequence[Message]]) -> int:
    """Counts the messages that both conversations of a pair begin with.

    Log-probabilities of answers among them would cancel in the loss, and count in the rewards.
    """
    return sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))
