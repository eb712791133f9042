"""Turns conversations into tokens by the tokenizer's chat template, with a mark at each token of an answer."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples, MappedExamples, Source, renamed
from mpjax.data.fields import Numbers, Tokens
from mpjax.data.table import Table, Text, require_columns
from mpjax.data.text.blocks import chunks
from mpjax.data.text.chat_template import ASSISTANT, ChatTemplate, Message, template_beside
from mpjax.data.text.tokenizers import PLAIN, HuggingFaceTokenizer, find_tokenizer, load_tokenizer
from mpjax.data.user_function import PreprocessedExamples, load_preprocess
from mpjax.errors import UsageError


T = TypeVar("T")

FORMS: tuple[tuple[str, ...], ...] = (("messages",), ("prompt", "completion"), ("instruction", "output"))
"""The columns that a conversation can be stored in; `input`, where it is there, is a part of `instruction`."""

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

    def have_special(self, talks: Sequence[Sequence[Message]]) -> list[bool]:
        """For each conversation, whether the text of a message has that of a special token."""
        texts = self.special.values()
        return [any(text in message["content"] for message in messages for text in texts) for messages in talks]

    def marked(
        self, talks: Sequence[Sequence[Message]], shared: Sequence[int] | None = None
    ) -> list[tuple[list[int], np.ndarray]]:
        """Tokenizes conversations: for each its tokens, and True for those of an answer, bool [tokens].

        Answers among the first `shared` messages of a conversation are not marked.

        Raises:
          UsageError: the template fails (`ChatTemplate.conversation`), or marks another number of answers than there
            are, so that those among the first messages cannot be told.
        """
        marked = [self.template.conversation(messages) for messages in talks]
        encoded = self.tokenizer.with_places([text for text, _ in marked])
        early = [
            sum(message["role"] == ASSISTANT for message in messages[:first])
            for messages, first in zip(talks, shared or [0] * len(talks), strict=True)
        ]
        for (_, answers), messages, first in zip(marked, talks, early, strict=True):
            turns = sum(message["role"] == ASSISTANT for message in messages)
            if first and len(answers) != turns:
                raise UsageError(
                    f"the chat template marks {len(answers)} answers in {turns} messages of the assistant, so that "
                    "those in a prompt cannot be told from the others: let {% generation %} enclose each message"
                )
        return [
            (tokens, _in_answers(answers[first:], places))
            for (_, answers), first, (tokens, places) in zip(marked, early, encoded, strict=True)
        ]


def load_chat(name: str) -> Chat:
    """Loads a tokenizer of Hugging Face and its chat template.

    Raises:
      UsageError: the tokenizer is none of Hugging Face's, or cannot be loaded, or has no chat template.
    """
    if name in PLAIN:
        raise UsageError(
            f"--data.tokenizer {name} has no chat template, which conversations need: write --data.tokenizer "
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

    @classmethod
    def of(
        cls, encoded: Sequence[tuple[np.ndarray, np.ndarray]], length: int, tokenizer: HuggingFaceTokenizer
    ) -> "Conversations":
        """Concatenates at least one conversation; each is its tokens and its marks, both [at most `length` + 1]."""
        small = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
        tokens, marks = zip(*encoded, strict=True)
        starts = np.cumsum([0, *map(len, tokens)])
        return cls(np.concatenate(tokens).astype(small), np.concatenate(marks), starts, length, tokenizer.padding)

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
    notes: list[str] = []
    train, test = (
        _tokenized(rows, chat, config.length, split, notes) for rows, split in stored_rows(table, config, FORMS)
    )
    vocabulary = chat.tokenizer.vocabulary
    fields = {"tokens": Tokens(config.length + 1, vocabulary), "answers": Numbers((config.length + 1,), np.dtype(bool))}
    return Source(table.name, fields, train, test, notes=tuple(dict.fromkeys(notes)))


def stored_rows(
    table: Table, config: Data, forms: Sequence[Sequence[str]], *, kind: str = "conversations"
) -> list[tuple[Examples, str]]:
    """Opens both splits of a stored set as rows of one of some forms, each with its name for messages.

    `kind` names what the rows are, in messages.

    Raises:
      UsageError: the set has the columns of no form or of several, or `config.preprocess` cannot be used.
    """
    columns = _columns(table, config, forms, kind)
    rename = functools.partial(renamed, columns)
    splits: Any = table.open(tuple(dict.fromkeys(columns.values())))
    splits = [MappedExamples(split, rename) for split in splits]
    if config.preprocess:
        function = load_preprocess(config.preprocess)
        kinds = {field: table.columns[column] for field, column in columns.items()}
        splits = [PreprocessedExamples(split, function, str(config.preprocess), kinds) for split in splits]
    names = (f"split '{name}' of '{table.name}'" for name in (config.train_split, config.test_split))
    return list(zip(splits, names, strict=True))


def _wanted(forms: Sequence[Sequence[str]]) -> str:
    return " or ".join(" and ".join(form) for form in forms)


def _columns(table: Table, config: Data, forms: Sequence[Sequence[str]], kind: str) -> dict[str, str]:
    known = [*dict.fromkeys(itertools.chain(*forms)), *(["input"] if ("instruction", "output") in forms else [])]
    if unknown := sorted(set(config.columns) - set(known)):
        raise UsageError(f"--data.columns {unknown[0]}: {kind} have the fields {', '.join(known)}")
    require_columns(table, config.columns)
    if config.preprocess:
        return dict(config.columns) or {name: name for name in table.columns}
    named = {name: name for name in known if name in table.columns} | dict(config.columns)
    there = [form for form in forms if all(field in named for field in form)]
    if config.columns:
        there = [form for form in there if not {*config.columns}.isdisjoint(form)]
    if len(there) != 1:
        which = " and ".join("/".join(form) for form in there)
        advised = _advised(table, there or forms)
        raise UsageError(
            f"data set '{table.name}' has {f'{kind} in {which}' if there else f'no {kind}'}; its columns "
            f"are {', '.join(table.columns)}; wanted {_wanted(forms)}; write --data.columns {advised}"
        )
    (form,) = there
    also = ("input",) if form[0] == "instruction" and "input" in named else ()
    return {field: named[field] for field in (*form, *also)}


def _advised(table: Table, forms: Sequence[Sequence[str]]) -> str:
    """The fields of a form that the columns could be, each with a column: those of a table of as many texts alone."""
    texts = [name for name, column in table.columns.items() if isinstance(column, Text)]
    alone = len(texts) == len(table.columns)
    form = next((form for form in forms if alone and 1 < len(form) <= len(texts)), forms[0])
    columns = texts if alone and len(texts) == len(form) > 1 else ["COLUMN"] * len(form)
    return " ".join(f"{field} {column}" for field, column in zip(form, columns, strict=True))


def messages_of(example: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], int]:
    """Reads the messages of a stored example of one of `FORMS`; what is None in a message is left out.

    Returns the messages, and how many of them are a prompt, whose answers do not count.

    Raises:
      UsageError: it has none of the forms, or a message without a role or a text.
    """
    form = next((form for form in FORMS if all(field in example for field in form)), None)
    if form is None:
        raise UsageError(f"{where} has {', '.join(example)}; wanted {_wanted(FORMS)}")
    if form == ("messages",):
        return checked_messages(example["messages"], where), 0
    asked, answered = (example[field] for field in form)
    more = example.get("input") if form[0] == "instruction" else None
    if isinstance(asked, str) and more:
        asked = f"{asked}\n\n{more}"
    prompt = as_messages(asked, "user")
    return checked_messages([*prompt, *as_messages(answered, ASSISTANT)], where), len(prompt)


def checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Copies the messages of a conversation as dicts; what is None in a message is left out.

    Raises:
      UsageError: there are none, or a message has no role or no text.
    """
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


def as_messages(value: Any, role: str) -> list[Any]:
    """The messages of a stored value: a list of messages itself, or a text as the one message of `role`."""
    return list(value) if isinstance(value, list | tuple) else [{"role": role, "content": value}]


def read_in_chunks(examples: Examples, split: str, read: Callable[[Example, str], T]) -> Iterator[list[T]]:
    """Yields what `read` makes of each stored example and of its name for messages, some examples at a time."""
    numbers = itertools.count()
    for chunk in chunks(examples, _AT_ONCE):
        yield [read(row, f"{split}, example {number}") for row, number in zip(chunk, numbers, strict=False)]


def _tokenized(examples: Examples, chat: Chat, length: int, split: str, notes: list[str]) -> Conversations:
    encoded: list[tuple[np.ndarray, np.ndarray]] = []
    cut = empty = taken = 0
    for read in read_in_chunks(examples, split, messages_of):
        talks = [messages for messages, _ in read]
        taken += sum(chat.have_special(talks))
        for tokens, mark in chat.marked(talks, [asked for _, asked in read]):
            cut += len(tokens) > length + 1
            # The first token is predicted from none.
            if not mark[1 : length + 1].any():
                empty += 1
                continue
            encoded.append((np.asarray(tokens[: length + 1], np.uint32), mark[: length + 1]))
    if cut or empty:
        notes.append(
            f"{split}: {cut:,} of {len(examples):,} conversations have more than {length + 1} tokens and are cut to "
            f"them (--data.length {length}); {empty:,} have no token of an answer in them and are left out"
        )
    notes += taken_as_special(split, taken)
    if not encoded:
        raise UsageError(
            f"{split}: none of {len(examples):,} conversations has an answer within {length + 1} tokens; write a "
            "larger --data.length, or look at the roles: answers are those of `assistant`"
        )
    return Conversations.of(encoded, length, chat.tokenizer)


def taken_as_special(split: str, count: int) -> list[str]:
    """Writes a note on the conversations of a split whose messages have the text of a special token, if any do."""
    if not count:
        return []
    return [
        f"{split}: messages of {count:,} conversations have the text of a special token, such as an end of a turn, "
        "and are read as having the token there"
    ]


def _in_answers(answers: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]]) -> np.ndarray:
    """True for each token that begins inside an answer, bool [tokens]; one that begins before it has other text too."""
    begins = np.asarray([begin for begin, _ in places], np.int64)
    inside = np.zeros(len(places), bool)
    for first, last in answers:
        inside |= (begins >= first) & (begins < last)
    return inside
