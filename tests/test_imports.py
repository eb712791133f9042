"""The order of the folders, what `import mpjax` brings along, and the public names."""

import ast
import functools
import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import mpjax


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

from house import circles


PACKAGE = pathlib.Path(mpjax.__file__).parent
ORDER = ("precision", "config", "data", "models", "training", "loop", "diagnosis", "report", "plan", "commands")
FOR_ALL = (
    "errors",
    "files",
    "strict_json",
    "notebook",
    "ctrl_c",
    "mesh_axes",
    "jax_internals",
    "xla_cpu",
    "offers",
    "extend",
)
WIRING = ("cli",)


def sources():
    """The code of the package: a wheel holds `configs/` too, whose files are of a user's kind."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "configs")


@functools.cache
def trees():
    """The syntax tree of every file, by its path in the package."""
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sources()}


def stage(module):
    """`mpjax.loop.train` belongs to `loop`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_stages(tree):
    """Stages of mpjax that a module imports, also inside functions and for type checking."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (stage(alias.name) for alias in node.names if alias.name.split(".")[0] == "mpjax")
        elif isinstance(node, ast.ImportFrom) and node.module == "mpjax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpjax."):
            yield stage(node.module)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"


def test_a_folder_imports_only_those_before_it():
    wrong = {}
    for source, tree in trees().items():
        own = source.parts[0].removesuffix(".py")
        if own == "extend":
            continue  # it imports nothing; what it names is for type checkers and readers (tests/test_extend.py)
        before = (*ORDER, *WIRING) if own in WIRING else ORDER[: ORDER.index(own) + 1] if own in ORDER else ()
        if later := set(imported_stages(tree)) - {*FOR_ALL, *before}:
            wrong[str(source)] = later
    assert wrong == {}


def test_every_folder_has_its_place():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(ORDER)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", *FOR_ALL, *WIRING}


SETTINGS = {"import mpjax.config": {"jax", "flax", "numpy", "grain", "tensorflow_datasets"}}
LIBRARY = {
    "import mpjax": {"jax", "flax", "numpy", "grain", "tensorflow_datasets", "tyro"},
    "from mpjax import Policy, dynamic_loss_scaling": {"flax", "grain", "tensorflow_datasets", "tyro", "orbax"},
    "import mpjax.training.objectives": {"grain", "tensorflow_datasets", "orbax", "tyro", "mpjax.data", "jaxtyping"},
    "import mpjax.models": {"grain", "tensorflow_datasets", "orbax", "safetensors", "tyro"},
    "import mpjax.data": {"grain", "tensorflow_datasets", "orbax", "sklearn"},
    "from mpjax import make_train_step": {"grain", "tensorflow_datasets", "orbax", "matplotlib"},
}
"""Statements, and what is absent after each."""


@pytest.mark.parametrize("statements", [SETTINGS, LIBRARY], ids=["settings", "library"])
def test_an_import_brings_along_only_what_it_needs(statements):
    """One after the other in one interpreter."""
    code = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in statements)
    printed = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    lines = zip(statements.items(), printed, strict=True)
    wrong = {statement: absent & set(line.split()) for (statement, absent), line in lines}
    assert not any(wrong.values()), wrong


@pytest.mark.slow
def test_a_public_name_resolves_to_what_is_documented():
    """In a fresh interpreter: `mpjax.run` is the function, not the module of that name."""
    code = "import mpjax, types; values = [getattr(mpjax, name) for name in mpjax.__all__]\n"
    code += "print([v for v in values if not v.__doc__ or isinstance(v, types.ModuleType)])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.slow
def test_run_can_be_called_also_after_its_module_was_imported():
    code = "import mpjax.commands.train, mpjax\n"
    code += "try: mpjax.run(mpjax.Config(seed=-1))\n"
    code += "except mpjax.UsageError as error: print(error)"
    wanted = "--seed is -1: wanted 0 to 2**32 - 1\n"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == wanted


def test_an_unknown_name_is_an_attribute_error_that_suggests_the_nearest():
    with pytest.raises(AttributeError, match="module 'mpjax' has no attribute 'get_polcy'. Did you mean: 'get_policy'"):
        mpjax.get_polcy  # noqa: B018
    with pytest.raises(AttributeError, match="module 'mpjax' has no attribute 'xyzzy'$"):
        mpjax.xyzzy  # noqa: B018


def test_the_version_is_that_of_the_installed_package_and_types_are_told():
    assert mpjax.__version__ == importlib.metadata.version("mpjax")
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("folder", ORDER[:-1])
def test_a_folder_is_an_attribute_of_the_package(folder):
    assert getattr(mpjax, folder).__name__ == f"mpjax.{folder}"


@pytest.mark.slow
def test_no_module_imports_itself_around_others():
    """Not even by an import inside a function."""
    assert circles(PACKAGE) == []


def test_circles_are_found_also_through_an_import_inside_a_function(tmp_path):
    (tmp_path / "a.py").write_text("from mpjax.b import x\n")
    (tmp_path / "b.py").write_text("def f():\n    import mpjax.a\n")
    (tmp_path / "c.py").write_text("import mpjax.a\n")
    assert circles(tmp_path) == [["mpjax.a", "mpjax.b"]]


def test_no_function_has_the_name_of_its_module():
    functions = {path: {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} for path, tree in trees().items()}
    assert [str(path) for path, names in functions.items() if path.stem in names] == []


def test_one_file_names_what_jax_does_not_publish():
    private = {str(path.relative_to(PACKAGE)) for path in sources() if "jax._src" in path.read_text()}
    assert private == {"jax_internals.py"}


def test_no_test_imports_a_private_name():
    names = {}
    for path in pathlib.Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if "mpjax" in path.read_text() else ():
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("mpjax."):
                names |= {f"{path.name}: {alias.name}": 1 for alias in node.names if alias.name.startswith("_")}
    assert list(names) == []
