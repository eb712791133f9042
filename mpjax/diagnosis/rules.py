"""Rules that keep modules in float32: for which paths, in a policy, and as flags of the command line."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping

from mpjax.precision.policy import Policy


def is_in(path: str, module: str) -> bool:
    """Whether a path is that of a module or of one in it; "" is the model."""
    return not module or f"{path}/".startswith(f"{module}/")


def pattern_of(module: str) -> str:
    """The pattern for a module: its path, "?" for what means something in a pattern or a policy's text; "*" for ""."""
    return "".join("?" if character in "*?[=;" else character for character in module) or "*"


def covers(rules: Iterable[str], path: str) -> bool:
    """Whether one of some rules, each the pattern of a module, is for a path."""
    return any(is_in(pattern_of(path), "" if pattern == "*" else pattern) for pattern in rules)


def decides_after(rules: Iterable[str], pattern: str) -> bool:
    """Whether a policy's rule still decides something behind these; one that does not would be an error."""
    return pattern.startswith("type:") or not covers(rules, pattern)


def with_rules(policy: Policy, rules: Mapping[str, str]) -> Policy:
    """The policy with rules that come before its own."""
    kept = {pattern: value for pattern, value in policy.rules.items() if decides_after(rules, pattern)}
    return dataclasses.replace(policy, rules={**rules, **kept})


def flags_of(rules: Mapping[str, str]) -> str:
    """What to add to a command line; empty if there are none."""
    words = [f"{_shell_word(path)} {dtype}" for path, dtype in rules.items()]
    return " ".join(["--precision.rules", *words]) if words else ""


def _shell_word(path: str) -> str:
    return shlex.quote(path) if set(path) & set('"\\$`!') else f'"{path}"'
