"""The directive `{flags} COMMAND`: all flags of a command, from the fields and docstrings that its `--help` shows."""

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import tyro
from docutils import nodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from mpjax.cli import COMMANDS
from mpjax.config import Config


KINDS = {str: "TEXT", int: "INT", float: "FLOAT"}
(WITHOUT_FLAG,) = tyro.conf.Positional[str].__metadata__


class Flags(SphinxDirective):
    """An anchor, the values, the default and the help of every flag; `{option}` links to one."""

    required_arguments = 1

    def run(self):
        """Returns the flags of the command, and a section for each dataclass of settings inside."""
        (command,) = self.arguments
        self.env.ref_context["std:program"] = command
        found = []
        for kind in map(_named, COMMANDS[command].settings):
            if kind is Config and command != "train":
                found += self.parse_text_to_nodes("All [flags of a run](train.md) are flags of this command too.")
            else:
                found += self.section(kind, "")
        return found

    def section(self, kind: type, prefix: str) -> list[nodes.Node]:
        """Returns what a dataclass says of itself, its flags, and the sections of the dataclasses inside it."""
        self.env.note_dependency(inspect.getfile(kind))
        hints = typing.get_type_hints(kind, include_extras=True)
        inside = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
        text = [inspect.cleandoc(kind.__doc__ or ""), *flags(kind, hints, prefix)]
        found = self.parse_text_to_nodes("\n\n".join(text))
        for name, hint in inside.items():
            title = nodes.title(text=name)
            found.append(nodes.section("", title, *self.section(hint, f"{prefix}{name}."), ids=[name], names=[name]))
        return found


def flags(kind: type, hints: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yields the Markdown of each flag of a dataclass."""
    helps = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
    for field in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(hints[field.name]):
            text = "\n".join([markdown(helps[kind.__name__, field.name]), *default(field)])
            yield f"~~~{{option}} {spelling(prefix + field.name, hints[field.name])}\n\n{text}\n~~~"


def markdown(help: list[str]) -> str:
    """Returns a help text with its flags as code and without HTML: `<data>` stands for something."""
    parts = "\n".join(help).split("`")
    parts[::2] = [re.sub(r"--[a-z_.]+[a-z]", r"`\g<0>`", part.replace("<", r"\<")) for part in parts[::2]]
    return "`".join(parts)


def spelling(name: str, hint: Any) -> str:
    """Returns a flag as it is typed, with its values: `--data.mean FLOAT ...`, `--resume, --no_resume`."""
    if hint is bool:
        section, dot, last = name.rpartition(".")
        return f"--{name}, --{section}{dot}no_{last}"
    marks = getattr(hint, "__metadata__", ())
    words = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None) or values(hint)
    return words if WITHOUT_FLAG in marks else f"--{name} {words}"


def values(hint: Any) -> str:
    """Returns the values of a type: `INT`, `auto|on|off`, `TEXT TEXT ...` of a dict of texts."""
    match typing.get_origin(hint), typing.get_args(hint):
        case None, () if hint in KINDS:
            return KINDS[hint]
        case origin, (kind, *_) if origin is typing.Annotated:
            return values(kind)
        case origin, words if origin is Literal:
            return "|".join(str(word) for word in words if word != "")
        case origin, (each, *_) if origin is tuple:
            return f"{values(each)} ..."
        case origin, (key, value) if origin is dict:
            return f"{values(key)} {values(value)} ..."
    raise TypeError(f"no words for values of type {hint}")


def default(field: dataclasses.Field) -> Iterator[str]:
    """Yields the line that says a field's default."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        yield "Required."
    elif field.default not in ("", (), dataclasses.MISSING):
        value = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        yield f"Default: `{value}`"


def _named(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def setup(app):
    """Registers the directive."""
    app.add_directive("flags", Flags)
    return {"parallel_read_safe": True}
