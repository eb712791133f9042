"""Turns conversations into tokens by the tokenizer's chat template, with a mark at each token of an answer."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples, MappedExamples, Source, renamed
from mpjax.data.fields import Numbers, Tokens
from mpjax.data.table import Table
from mpjax.data.text.chat_template import ASSISTANT, ChatTemplate, Message, template_beside
from mpjax.data.text.tokenizers import PLAIN, HuggingFaceTokenizer, find_tokenizer, load_tokenizer
from mpjax.data.user_function import PreprocessedExamples, load_preprocess
from mpjax.errors import UsageError


FORMS: tuple[tuple[str, ...], ...] = (("messages",), ("prompt", "completion"), ("instruction", "output"))
"""The columns that a conversation can be stored in; `input`, where it is there, is a part of `instruction`."""

_WANTED = " or ".join(" and ".join(form) for form in FORMS)

_AT_ONCE = 1000  # conversations: enough to occupy the tokenizer's threads


class Chat(NamedTuple):
    """A tokenizer with its chat template."""

    tokenizer: HuggingFaceTokenizer
    template: ChatTemplate

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of messages, and of what stands before the answer to them."""
        ((tokens, _),) = self.tokenizer.with_places([self.template.prompt(messages)])
        return tokens

    @property
    def ends(self) -> frozenset[int]:
        """The special token with which the template ends an answer, if it does so with one."""
        content = "answer"
        messages = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": content}]
        text, answers = self.template.conversation(messages)
        behind = text[answers[-1][0] :].partition(content)[2]
        ((tokens, _),) = self.tokenizer.with_places([behind])
        return frozenset(tokens[:1]) & self.special.keys()

    @property
    def special(self) -> dict[int, str]:
        """The texts of the special tokens, which are these tokens wherever they stand."""
        added = self.tokenizer.tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}


def load_chat(name: str) -> Chat:
    """Loads a tokenizer of Hugging Face and its chat template.

    Raises:
      UsageError: the tokenizer is none of Hugging Face's, or cannot be loaded, or has no chat template.
    """
    if name in PLAIN:
        raise UsageError(
            f"--data.tokenizer {name} has no chat template, which --task instructions needs: write --data.tokenizer "
            "FOLDER, a folder with tokenizer.json and tokenizer_config.json of a model for chats"
        )
    tokenizer: Any = load_tokenizer(name)
    path = find_tokenizer(name)
    return Chat(tokenizer, template_beside(path if path.is_dir() else path.parent, name))


@dataclasses.dataclass(frozen=True)
class Conversations(Examples):
    """Examples with `tokens`, int32 [length + 1], padded at the end, and `answers`, bool [length + 1].

    Args:
      values: unsigned [total], the tokens of all conversations, concatenated; none has more than `length` + 1.
      marks: bool [total], True for the tokens of answers.
      starts: int64 [N + 1], the index in `values` at which each conversation starts, and the total.
      length: the number of tokens that a model reads.
      padding: the padding token.
    """

    values: np.ndarray
    marks: np.ndarray
    starts: np.ndarray
    length: int
    padding: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        part = slice(self.starts[index], self.starts[index + 1])
        tokens, answers = np.full(self.length + 1, self.padding, np.int32), np.zeros(self.length + 1, bool)
        size = part.stop - part.start
        tokens[:size], answers[:size] = self.values[part], self.marks[part]
        return {"tokens": tokens, "answers": answers}


def conversations(table: Table, config: Data) -> Source:
    """Tokenizes the conversations of both splits now, and holds the tokens in memory.

    The fields are `tokens`, `config.length` + 1 of a conversation, of which a model reads all but the last, and
    `answers`, True where a token is one of an answer. A longer conversation is cut at its end. One without a token of
    an answer, perhaps because all are cut, is left out. `Source.notes` say how many.

    Args:
      table: the stored set, with the columns of one of `FORMS`.
      config: `tokenizer`, `length`, `columns` and `preprocess`.

    Raises:
      UsageError: the set has no such columns or several kinds of them, a conversation is none, the tokenizer or its
        template cannot be used (`load_chat`), or no conversation of a split has an answer.
    """
    chat = load_chat(config.tokenizer)
    columns = _columns(table, config)
    rename = functools.partial(renamed, columns)
    splits: Any = table.open(tuple(dict.fromkeys(columns.values())))
    splits = [MappedExamples(split, rename) for split in splits]
    if config.preprocess:
        function = load_preprocess(config.preprocess)
        kinds = {field: table.columns[column] for field, column in columns.items()}
        splits = [PreprocessedExamples(split, function, str(config.preprocess), kinds) for split in splits]
    notes: list[str] = []
    names = (config.train_split, config.test_split)
    train, test = (
        _tokenized(split, chat, config.length, f"split '{name}' of '{table.name}'", notes)
        for split, name in zip(splits, names, strict=True)
    )
    vocabulary = chat.tokenizer.vocabulary
    fields = {"tokens": Tokens(config.length + 1, vocabulary), "answers": Numbers((config.length + 1,), np.dtype(bool))}
    return Source(table.name, fields, train, test, notes=tuple(dict.fromkeys(notes)))


def _columns(table: Table, config: Data) -> dict[str, str]:
    known = [*dict.fromkeys(itertools.chain(*FORMS)), "input"]
    if unknown := sorted(set(config.columns) - set(known)):
        raise UsageError(f"--data.columns {unknown[0]}: conversations have the fields {', '.join(known)}")
    if missing := [name for name in config.columns.values() if name not in table.columns]:
        raise UsageError(f"--data.columns: '{table.name}' has no {missing[0]}; it has {', '.join(table.columns)}")
    if config.preprocess:
        return dict(config.columns) or {name: name for name in table.columns}
    named = {name: name for name in known if name in table.columns} | dict(config.columns)
    forms = [form for form in FORMS if all(field in named for field in form)]
    if config.columns:
        forms = [form for form in forms if not {*config.columns}.isdisjoint(form)]
    if len(forms) != 1:
        which = " and ".join("/".join(form) for form in forms)
        raise UsageError(
            f"data set '{table.name}' has {f'conversations in {which}' if forms else 'no conversations'}; its columns "
            f"are {', '.join(table.columns)}; wanted {_WANTED}; write --data.columns {(forms or FORMS)[0][0]} COLUMN"
        )
    (form,) = forms
    also = ("input",) if form[0] == "instruction" and "input" in named else ()
    return {field: named[field] for field in (*form, *also)}


def messages_of(example: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Reads the messages of a stored example of one of `FORMS`; what is None in a message is left out.

    Raises:
      UsageError: it has none of the forms, or a message without a role or a text.
    """
    form = next((form for form in FORMS if all(field in example for field in form)), None)
    if form is None:
        raise UsageError(f"{where} has {', '.join(example)}; wanted {_WANTED}")
    if form == ("messages",):
        messages = example["messages"]
    else:
        asked, answered = (example[field] for field in form)
        more = example.get("input") if form[0] == "instruction" else None
        if isinstance(asked, str) and more:
            asked = f"{asked}\n\n{more}"
        messages = [*_as_messages(asked, "user"), *_as_messages(answered, ASSISTANT)]
    if not isinstance(messages, list | tuple | np.ndarray) or not len(messages):
        raise UsageError(f"{where}: messages are {messages!r:.60}; wanted a list of messages")
    read = []
    for number, message in enumerate(messages):
        stored = dict(message) if isinstance(message, Mapping) else {}
        for name in ("role", "content"):
            if not isinstance(stored.get(name), str):
                raise UsageError(
                    f"{where}: message {number} is {message!r:.80}; wanted a dict with the texts `role` and `content`; "
                    "write --data.preprocess FILE.py:FUNCTION with a function that makes `messages` of an example"
                )
        read.append({name: value for name, value in stored.items() if value is not None})
    return read


def _as_messages(value: Any, role: str) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [{"role": role, "content": value}]


def _tokenized(examples: Examples, chat: Chat, length: int, split: str, notes: list[str]) -> Conversations:
    values: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    special = re.compile("|".join(map(re.escape, chat.special.values())) or r"(?!)")  # without any, it matches nothing
    cut = empty = taken = 0
    for start in range(0, len(examples), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(examples)))
        rows = zip(numbers, examples.__getitems__(numbers), strict=True)
        talks = [messages_of(row, f"{split}, example {number}") for number, row in rows]
        taken += sum(any(special.search(message["content"]) for message in messages) for messages in talks)
        marked = [chat.template.conversation(messages) for messages in talks]
        encoded = chat.tokenizer.with_places([text for text, _ in marked])
        for (_, answers), (tokens, places) in zip(marked, encoded, strict=True):
            mark = _in_answers(answers, places)
            cut += len(tokens) > length + 1
            # The first token is predicted from none.
            if not mark[1 : length + 1].any():
                empty += 1
                continue
            values.append(np.asarray(tokens[: length + 1], np.uint32))
            marks.append(mark[: length + 1])
    if cut or empty:
        notes.append(
            f"{split}: {cut:,} of {len(examples):,} conversations have more than {length + 1} tokens and are cut to "
            f"them (--data.length {length}); {empty:,} have no token of an answer in them and are left out"
        )
    if taken:
        notes.append(
            f"{split}: messages of {taken:,} conversations have the text of a special token, such as an end of a turn, "
            "and are read as having the token there"
        )
    if not values:
        raise UsageError(
            f"{split}: none of {len(examples):,} conversations has an answer within {length + 1} tokens; write a "
            "larger --data.length, or look at the roles: answers are those of `assistant`"
        )
    small = np.uint16 if chat.tokenizer.vocabulary <= 2**16 else np.uint32
    starts = np.cumsum([0, *map(len, values)])
    together = np.concatenate(values).astype(small)
    return Conversations(together, np.concatenate(marks), starts, length, chat.tokenizer.padding)


def _in_answers(answers: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]]) -> np.ndarray:
    """True for each token that begins inside an answer, bool [tokens]; one that begins before it has other text too."""
    begins = np.asarray([begin for begin, _ in places], np.int64)
    inside = np.zeros(len(places), bool)
    for first, last in answers:
        inside |= (begins >= first) & (begins < last)
    return inside
