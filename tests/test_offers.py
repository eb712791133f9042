"""What the folders of mpjax offer, and who imports from folders and who from files."""

import ast
import collections
import pathlib
import re
import subprocess
import sys

import pytest

import mpjax
import mpjax.data
import mpjax.training


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

from house import files_inside, modules_of


ROOT = pathlib.Path(__file__).parents[1]
MODULES = modules_of(pathlib.Path(mpjax.__file__).parent)
FOLDERS = [name for name, path in MODULES.items() if path.name == "__init__.py" and name != "mpjax"]
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def offered(folder):
    """The lines of a folder's stub: module, name and name under which it is offered."""
    for node in ast.parse(MODULES[folder].with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name, alias.asname) for alias in node.names)


def defined(module):
    """The names that a file defines: it does not only import them."""
    body = TREES[module].body
    branches = [inner for node in body if isinstance(node, ast.If) for inner in node.body + node.orelse]
    for node in body + branches:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name))


@pytest.mark.parametrize("folder", ["mpjax", *FOLDERS])
def test_a_folder_offers_names_that_a_file_of_it_defines(folder):
    lines = [line for line in offered(folder) if folder != "mpjax" or line[0] != "mpjax"]
    assert [line for line in lines if line[1] != line[2]] == [], "a type checker takes them for private"
    assert [name for name, count in collections.Counter(name for _, name, _ in lines).items() if count > 1] == []
    assert [name for module, name, _ in lines if name not in defined(module)] == []
    assert [module for module, _, _ in lines if not module.startswith(f"{folder}.")] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_offered_name_is_private_or_that_of_a_file(folder):
    """The attribute of a folder would be the one or the other, by what was imported before."""
    names = [name for _, name, _ in offered(folder)]
    assert [name for name in names if name.startswith("_") or f"{folder}.{name}" in MODULES] == []


IMPORT = re.compile(r"from (mpjax[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")
OUTSIDE = [
    path.read_text()
    for folder in ("tests", "scripts", "benchmarks", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".ipynb")
]


def used():
    """What is taken through folders outside of the package, in programs, in their texts and on pages."""
    names = collections.defaultdict(set)
    for text in OUTSIDE:
        for folder, lines, line in IMPORT.findall(text):
            taken = re.findall(r"(\w+)(?: as (\w+))?", lines or line)
            names[folder] |= {name for name, _ in taken}
            for name, other in taken if folder == "mpjax" else ():
                names[f"mpjax.{name}"] |= set(re.findall(rf"\b{other or name}\.(\w+)", text))
        for folder, name in re.findall(r"\b(mpjax(?:\.\w+)+)\.(\w+)", text):
            names[folder].add(name)
    for module, name, _ in offered("mpjax"):  # what mpjax offers, its folder does
        names[".".join(module.split(".")[:2])].add(name)
    return names


def test_what_nobody_outside_uses_is_not_offered():
    taken = used()
    unused = {folder: [name for _, name, _ in offered(folder) if name not in taken[folder]] for folder in FOLDERS}
    assert {folder: names for folder, names in unused.items() if names} == {}


def test_a_file_of_the_package_imports_from_files():
    """So it reads no stub, and imports nothing but what it names; circles are seen (tests/test_imports.py)."""
    through = [
        f"{module}: from {node.module} import {alias.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("mpjax", *FOLDERS)
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES or f"{node.module}.{alias.name}" in FOLDERS
    ]
    assert through == []


def test_a_test_imports_from_folders_but_for_files_in_which_it_replaces_something():
    """Or looks at it as a whole, or at what is private there: then the file itself is what the test is about."""
    reasons = {
        f"{path.relative_to(ROOT)}: {module}{'.' if name else ''}{name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for module, name in files_inside(path, MODULES)
        if name or not is_about(module, path)
    }
    assert reasons == set()


def is_about(module, path):
    """True where a test hands the module on, as to `monkeypatch.setattr`, sets its attributes or reads private ones."""
    tree = ast.parse(path.read_text())
    imports = (alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
    names = {alias.asname or alias.name for alias in imports if alias.name == module.rpartition(".")[2]}
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    read = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not node.attr.startswith("_")
    ]
    return any(node not in read for node in loads)


def test_a_folder_alone_imports_none_of_its_files():
    code = "import sys\n" + "".join(f"import {folder}\n" for folder in FOLDERS)
    code += "print(*sorted(name for name in sys.modules if name.startswith('mpjax.')))"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert printed == sorted([*FOLDERS, "mpjax.offers", "mpjax.xla_cpu"])


def test_all_names_of_a_folder_are_those_of_its_stub():
    stars = {}
    exec("from mpjax.training import *", stars)
    names = [name for _, name, _ in offered("mpjax.training")]
    assert mpjax.training.__all__ == names
    assert sorted(stars.keys() - {"__builtins__"}) == dir(mpjax.training) == sorted(names)


def test_an_unknown_name_of_a_folder_suggests_the_nearest():
    with pytest.raises(AttributeError, match="has no attribute 'open_sauce'. Did you mean: 'open_source'"):
        mpjax.data.open_sauce  # noqa: B018


def test_what_a_test_replaces_in_a_file_is_what_its_folder_offers_meanwhile(monkeypatch):
    before = mpjax.training.make_mesh
    monkeypatch.setattr("mpjax.training.mesh.make_mesh", 1)
    assert mpjax.training.make_mesh == 1
    monkeypatch.undo()
    assert mpjax.training.make_mesh is before


def test_a_file_is_an_attribute_of_its_folder():
    assert mpjax.training.train_step.__name__ == "mpjax.training.train_step"
