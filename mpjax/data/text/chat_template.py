"""The chat template of a tokenizer: what a conversation is as text, and which of its characters are answers.

A template is a program in Jinja, written by a stranger. It runs in Jinja's sandbox, sees only the messages and the
texts of the tokenizer's special tokens, and has no files to include.
"""

import datetime
import json
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpjax.errors import UsageError, first_line


Message = Mapping[str, Any]
"""A turn of a conversation: `role` and `content`, both texts, and what else a template may read."""

ASSISTANT = "assistant"

_INSTALL = "write: pip install 'mpjax[hf]'"


class Marked(NamedTuple):
    """A conversation as text.

    Attributes:
      text: the text.
      answers: where each answer begins and ends in it, by characters.
    """

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """A compiled template.

    Args:
      name: the name of the tokenizer in messages.
      source: the text of the template.
      special: the texts of special tokens, by name, such as `eos_token`.

    Raises:
      UsageError: the template is no Jinja, or the package jinja2 is missing.
    """

    def __init__(self, name: str, source: str, special: Mapping[str, str]):
        try:
            import jinja2
        except ImportError as error:
            raise UsageError(f"the chat template of {name} needs the package jinja2 ({error}); {_INSTALL}") from error
        environment: Any = _sandbox()(
            trim_blocks=True, lstrip_blocks=True, extensions=[_marking(), "jinja2.ext.loopcontrols"]
        )
        environment.marks_answers = False
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template of {name} is damaged: {first_line(error)}; fetch it again") from error
        self._name = name
        self._marks_answers = environment.marks_answers
        self._special = dict(special)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of messages, and what stands before the answer to them.

        Raises:
          UsageError: the template fails on the messages.
        """
        return self._rendered(messages, prompt=True).text

    def conversation(self, messages: Sequence[Message]) -> Marked:
        """The text of messages, and where answers are: what `{% generation %}` marks, if the template has it.

        Otherwise, an answer is what the text of the messages up to it has behind the prompt for it.

        Raises:
          UsageError: the template fails on the messages, marks no answer though there is one, or has another text for
            the first messages of a conversation than the conversation begins with.
        """
        whole = self._rendered(messages, prompt=False)
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            return Marked(whole.text, [])
        if self._marks_answers:
            if not whole.answers:
                raise UsageError(
                    f"the chat template of {self._name} has {{% generation %}}, and marks nothing in a conversation "
                    "with an answer; repair the template"
                )
            return whole
        answers = []
        for turn in turns:
            prompt = self._rendered(messages[:turn], prompt=True).text
            through = self._rendered(messages[: turn + 1], prompt=False).text
            if not (through.startswith(prompt) and whole.text.startswith(through)):
                raise UsageError(
                    f"the chat template of {self._name} has another text for the first {turn + 1} of {len(messages)} "
                    "messages than the whole conversation begins with, so that nobody can tell which tokens are the "
                    "answer: mark answers in the template by {% generation %}...{% endgeneration %}"
                )
            answers.append((len(prompt), len(through)))
        return Marked(whole.text, answers)

    def _rendered(self, messages: Sequence[Message], *, prompt: bool) -> Marked:
        begin, end = (f"{uuid.uuid4().hex}" for _ in range(2))  # no text has them
        try:
            text = self._template.render(
                **self._special,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **dict(zip(_MARKS, (begin, end), strict=True)),
            )
        except Exception as error:  # the sandbox refuses by several exceptions, and a template has its own faults
            raise UsageError(f"the chat template of {self._name} fails: {type(error).__name__}: {error}") from error
        return _without_marks(text, begin, end)


_MARKS = ("_answer_begins", "_answer_ends")
"""The variables of a template whose texts stand around the answers, until `_without_marks`."""


def _sandbox() -> type:
    """Makes a class of Jinja's sandbox in which reading an unsafe attribute raises SecurityError at once.

    A template cannot change the lists and dicts that it is given either.
    """
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            """Raises; in Jinja's own sandbox the attribute would be an empty text until it is used."""
            raise SecurityError(f"it reads the attribute {attribute!r} of a {type(obj).__name__}, which is not safe")

    return Sandbox


def _marking() -> type:
    """Makes the extension of Jinja for `{% generation %}...{% endgeneration %}`, which puts marks around an answer."""
    from jinja2 import ext, nodes

    class Marking(ext.Extension):
        def parse(self, parser):
            line = next(parser.stream).lineno
            environment: Any = self.environment
            environment.marks_answers = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in _MARKS)
            return [begin, *body, end]

    Marking.tags = {"generation"}
    return Marking


def _without_marks(text: str, begin: str, end: str) -> Marked:
    first, *rest = text.split(begin)
    answers = []
    for piece in rest:
        answer, _, behind = piece.partition(end)
        answers.append((len(first), len(first) + len(answer)))
        first += answer + behind
    return Marked(first, answers)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes characters of HTML, which a chat has as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)


def template_beside(folder: pathlib.Path, name: str) -> ChatTemplate:
    """Reads the chat template in the folder of a tokenizer: `chat_template.jinja`, or that of tokenizer_config.json.

    Of several in tokenizer_config.json, it is the one named `default`.

    Args:
      folder: the folder.
      name: the name of the tokenizer in messages.

    Raises:
      UsageError: there is none, a file is damaged, or `ChatTemplate` raises.
    """
    settings: dict[str, Any] = {}
    for beside in ("special_tokens_map.json", "tokenizer_config.json"):
        if (file := folder / beside).is_file():
            settings |= _object_in(file)
    file = folder / "chat_template.jinja"
    source = _read(file) if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if isinstance(source, dict):
        source = source.get("default")
    if not isinstance(source, str):
        raise UsageError(
            f"the tokenizer {name} has no chat template: {folder} has neither chat_template.jinja nor a "
            "`chat_template` in tokenizer_config.json; put one there, or write --data.tokenizer FOLDER with that of a "
            "model for chats"
        )
    special = {}
    for key, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return ChatTemplate(name, source, special)


def _object_in(file: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(file))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is damaged ({error}); fetch it again, or remove it") from error
    return value


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error}); fetch it again, or remove it") from error
