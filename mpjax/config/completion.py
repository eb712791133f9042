"""Generates the shell script that completes the commands, their flags and the values that flags choose from."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from mpjax.config.choices import MODELS
from mpjax.config.program import NAME
from mpjax.config.schema import Config
from mpjax.config.setting_types import ModelName
from mpjax.errors import UsageError


SHELLS = ("bash", "zsh")


def script(shell: str, commands: Mapping[str, Sequence[type]]) -> str:
    """Generates the script that a shell evaluates to complete command lines of `mpjax`.

    Args:
      shell: one of `SHELLS`.
      commands: the names of the commands, and the dataclasses with the flags of each.

    Raises:
      UsageError: there is no such shell.
    """
    if shell not in SHELLS:
        raise UsageError(f"--print-completion {shell or 'without a shell'}: wanted {' or '.join(SHELLS)}")
    flags, values = [], []
    for command, kinds in commands.items():
        choices = {"--help": (), **{flag: words for kind in kinds for flag, words in flags_of(kind)}}
        if Config in kinds:
            choices["--config"] = ()
        flags.append(f"    {command}) flags='{' '.join(sorted(choices))}' ;;")
        values += [f"    '{command} {flag}') values='{' '.join(words)}' ;;" for flag, words in choices.items() if words]
    text = _BASH.replace("@NAME@", NAME).replace("@COMMANDS@", " ".join(["--help", "--version", *commands]))
    text = text.replace("@FLAGS@", "\n".join(flags)).replace("@VALUES@", "\n".join(values))
    return _ZSH + text if shell == "zsh" else text


def flags_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Sequence[str]]]:
    """Yields each flag of a dataclass and of its nested dataclasses, with its valid values.

    The values are empty if the flag is a bool (which has a second flag, `--no_NAME`) or takes any value. Positional
    arguments, `runs` and `inputs`, are left out. `prefix` is the name of a nested section with a dot.
    """
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        if dataclasses.is_dataclass(inner):
            yield from flags_of(inner, f"{prefix}{name}.")
        elif inner is bool:
            yield f"--{prefix}{name}", ()
            yield f"--{prefix}no_{name}", ()
        elif name not in ("runs", "inputs"):  # positional words
            yield f"--{prefix}{name}", tuple(MODELS) if hint == ModelName else _choices(hint)


def _choices(hint: Any) -> Sequence[str]:
    if typing.get_origin(hint) is Literal:
        return [str(word) for word in typing.get_args(hint) if word != ""]
    parsers = getattr(hint, "__metadata__", ())  # the parsers of a list of words
    return next((parser.choices for parser in parsers if getattr(parser, "choices", None)), ())


# zsh runs the functions that complete for bash.
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"

# Values are completed for the last flag, after any number of words. Files are completed where no values are known.
_BASH = """\
_@NAME@_complete() {
  local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} flag= flags= values= i
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '@COMMANDS@' -- "$word"))
    return
  fi
  for ((i = COMP_CWORD - 1; i > 1; i--)); do
    if [[ ${COMP_WORDS[i]} == --* ]]; then
      flag=${COMP_WORDS[i]}
      break
    fi
  done
  case $command in
@FLAGS@
  esac
  case "$command $flag" in
@VALUES@
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [[ $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
  fi
}
complete -o default -F _@NAME@_complete @NAME@"""
