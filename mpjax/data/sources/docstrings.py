"""Writes a text data set that needs no download: the docstrings of Python's standard library, labelled by package."""

import ast
import collections
import pathlib
import platform
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow_datasets as tfds

from mpjax.data.sources.generated import prepare
from mpjax.errors import UsageError


TEST_EVERY = 10
PACKAGES = 10
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_DESCRIPTION = """The documentation strings of Python's standard library, read from its source files: of the ten
packages or modules that have the most, each text once, without tests. The label says which package or module it is
from. About every tenth, by a checksum of its name, is the test split. Another Python has other texts: its version is
part of the name. Licensed under the Python Software Foundation License Version 2."""

_CITATION = """@misc{python,
  author = {{Python Software Foundation}},
  title = {The Python Standard Library},
  url = {https://docs.python.org/3/library/}
}"""


class Docstring(NamedTuple):
    """A documentation string.

    Attributes:
      name: the module and the documented object, such as `json.decoder:JSONDecoder.decode`; `json.decoder:` is the
        module itself.
      text: the docstring without its indentation.
    """

    name: str
    text: str

    @property
    def package(self) -> str:
        """The name of the top-level package or module, such as `json`."""
        return self.name.partition(":")[0].partition(".")[0]

    @property
    def is_test(self) -> bool:
        """True if the docstring is in the test split: about every tenth, by a checksum of its name."""
        return zlib.crc32(self.name.encode()) % TEST_EVERY == 0


class Docstrings(tfds.core.GeneratorBasedBuilder):
    """Builder of the set `docstrings`: `text`, and `label` in [0, 10), one of ten packages of Python.

    The texts are read from the source files of this Python, whose version is the name of the config.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012
        tfds.core.BuilderConfig(name=f"python{platform.python_version()}", description="The Python that reads it.")
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        self._texts, names = of_largest(read_docstrings(_library()))
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=names)}
            ),
            supervised_keys=("text", "label"),
            homepage="https://docs.python.org/3/library/",
            citation=_CITATION,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # Python has the data
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool):
        for index, docstring in enumerate(self._texts):
            if docstring.is_test == test:
                yield index, {"text": docstring.text, "label": docstring.package}


def read_docstrings(library: pathlib.Path) -> Iterator[Docstring]:
    """Yields the docstrings of the Python files below a folder, ordered by path and then by position in the file.

    Files are parsed, not imported. Tests, installed packages and files that cannot be parsed are skipped.
    """
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        parts = path.relative_to(library).with_suffix("").parts
        if _SKIPPED.isdisjoint(parts):
            module = ".".join(parts).removesuffix(".__init__")
            try:
                with warnings.catch_warnings(action="ignore"):  # some old files contain invalid escapes
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue  # some files are deliberately invalid
            yield from _documented(tree, module, ())


def _documented(node: ast.AST, module: str, inside: tuple[str, ...]) -> Iterator[Docstring]:
    if isinstance(node, _DOCUMENTED):
        inside = (*inside, getattr(node, "name", ""))
        if text := (ast.get_docstring(node) or "").strip():
            yield Docstring(f"{module}:{'.'.join(inside[1:])}", text)
    for child in ast.iter_child_nodes(node):
        yield from _documented(child, module, inside)


def of_largest(docstrings: Iterable[Docstring]) -> tuple[list[Docstring], list[str]]:
    """Selects the docstrings of the ten packages with the most distinct texts, and lists these packages by name.

    Of several docstrings with the same text, only the first is kept and counted. The order of docstrings stays.

    Raises:
      UsageError: fewer than `PACKAGES` packages have docstrings.
    """
    once: dict[str, Docstring] = {}
    for docstring in docstrings:
        once.setdefault(docstring.text, docstring)
    counts = collections.Counter(docstring.package for docstring in once.values())
    largest = sorted(sorted(counts), key=lambda package: -counts[package])[:PACKAGES]
    if len(largest) < PACKAGES:
        raise UsageError(
            f"docstrings: {len(largest)} documented packages in {_library()}; wanted at least {PACKAGES}; "
            "the source files of this Python's standard library are missing: install them, or use another Python"
        )
    return [docstring for docstring in once.values() if docstring.package in largest], sorted(largest)


def _library() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_path("stdlib"))


def prepare_docstrings(data_dir: pathlib.Path) -> str:
    """Writes the data set of this Python's docstrings below `data_dir`, unless it exists, and returns its name.

    The name has the form `docstrings/pythonVERSION`. Raises UsageError as `prepare` and `of_largest`.
    """
    config = Docstrings.BUILDER_CONFIGS[0].name
    prepare(Docstrings, data_dir, config)
    return f"{Docstrings.name}/{config}"
