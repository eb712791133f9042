"""Writes the texts of the small recipe: what Python's standard library says of itself, and questions about it.

Below the folder, `text/train.jsonl` and `text/test.jsonl` have a documentation string in each line, behind the name of
what it documents. `chats/train.jsonl` and `chats/test.jsonl` have a question, "What does heapq.heappop do?", and the
first sentence of that string. About every twentieth name, by a checksum of it, is in the test files of both.
"""

import argparse
import ast
import json
import pathlib
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator


SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SENTENCE = re.compile(r".{10,200}?[.!](?=\s|$)", re.DOTALL)


def docstrings(library: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of documented modules, classes and functions; files are parsed, not imported."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED.isdisjoint(parts):
            try:
                with warnings.catch_warnings(action="ignore"):  # old files have invalid escapes
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue  # some files are deliberately invalid
            yield from below(tree, ".".join(parts).removesuffix(".__init__"))


def below(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of a node of a file and of those in it."""
    if isinstance(node, DOCUMENTED):
        name = name if isinstance(node, ast.Module) else f"{name}.{node.name}"
        if text := ast.get_docstring(node):
            yield name, text
    for child in ast.iter_child_nodes(node):
        yield from below(child, name)


def first_sentence(text: str) -> str | None:
    """The first sentence of a text on one line; None if it is very short or long, or has none."""
    match = SENTENCE.match(text.strip())
    return " ".join(match[0].split()) if match else None


def main() -> None:
    """Writes the four files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the folder to write")
    folder = parser.parse_args().output
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    once = {text: name for name, text in docstrings(pathlib.Path(sysconfig.get_path("stdlib")))}
    for text, name in sorted(once.items(), key=lambda item: zlib.crc32(item[1].encode())):  # no file beside its like
        split = "test" if zlib.crc32(name.encode()[::-1]) % 20 == 0 else "train"
        rows.setdefault(("text", split), []).append({"text": f"{name}\n\n{text}"})
        if sentence := first_sentence(text):
            chat = {"prompt": f"What does {name} do?", "completion": sentence}
            rows.setdefault(("chats", split), []).append(chat)
    for (kind, split), lines in rows.items():
        file = folder / kind / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{file}: {len(lines):,} lines")


if __name__ == "__main__":
    main()
