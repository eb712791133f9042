"""How a reader finds their way: sizes of files, imports, names, what three journeys execute, how docstrings open.

    python benchmarks/house.py                     # of the checkout that this file is in
    python benchmarks/house.py --package OTHER/mpjax --json

Circles count every import, also those inside functions. A journey executes a file if it calls a function of it other
than while importing; folder changes are counted over the files in the order in which they are first executed.
"""

import argparse
import ast
import collections
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import scipy.sparse.csgraph


HERE = pathlib.Path(__file__).resolve().parent.parent

TRAIN = """
from mpjax.cli import train
status = train("--config {configs}/digits.toml --steps 2 --precision.policy mixed_float16 --output_dir {folder}/run"
    " --cache_dir {folder} --data.data_dir {folder} --data.batch_size 16 --loop.log_every 1".split())
"""
DIAGNOSE = """
import jax, jax.numpy as jnp, mpjax
from flax import nnx
model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), lambda x: x * 1e4, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
status = mpjax.diagnose(model, lambda m, x: jnp.square(m(x)).mean(), jnp.ones((2, 4)), policy="mixed_float16") is None
"""
OWN_LOOP = """
import jax, jax.numpy as jnp, mpjax, optax
from flax import nnx
model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
mpjax.apply_policy(model, "mixed_float16")
graph, params = nnx.split(model)
tx = mpjax.dynamic_loss_scaling(optax.adamw(1e-3))
state = tx.init(params)
loss = lambda params, x: jnp.square(nnx.merge(graph, params)(x)).mean()
@jax.jit
def step(state, params, x):
    loss_value, gradients = mpjax.scaled_value_and_grad(loss)(state, params, x)
    updates, state = tx.update(gradients, state, params)
    return state, optax.apply_updates(params, updates), loss_value
status = step(state, params, jnp.ones((2, 4))) is None
"""
JOURNEYS = {"train a ResNet": TRAIN, "diagnose a model": DIAGNOSE, "a loop of one's own": OWN_LOOP}

WATCHED = """
import sys, threading
package, seen = {package!r} + "/", {{}}
def watch(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(package) and name not in seen and not importing(frame):
        seen[name] = None
def importing(frame):
    while frame and not (frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(package)):
        frame = frame.f_back
    return frame is not None
threading.setprofile(watch)
sys.setprofile(watch)
try:
{code}
finally:
    sys.setprofile(None)
    import json
    imported = [m for m in sys.modules if m.split(".")[0] == "mpjax"]
    json.dump([list(seen), len(imported)], open({result!r}, "w"))
assert not status, status
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how a reader finds their way.")
    parser.add_argument("--package", type=pathlib.Path, default=HERE / "mpjax")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    package = arguments.package.resolve()
    found: dict[str, Any] = sizes(package) | {"circles": circles(package)}
    found |= {"modules imported by one other": single(package)} | names(package)
    found |= {"files with a function that takes the whole Config": takers_of_config(package)}
    found |= {"test files that import from files in folders": reaching_inside(package)}
    found["journeys"] = {name: journey(package, code) for name, code in JOURNEYS.items()}
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        if name == "journeys":
            for each, counts in value.items():
                print(f"{each}: " + ", ".join(f"{key} {count}" for key, count in counts.items()))
        elif name == "circles":
            print(f"circles of imports: {len(value)}", *(" - ".join(circle) for circle in value), sep="\n  ")
        else:
            print(f"{name}: {value}")


def sizes(package: pathlib.Path) -> dict:
    """Returns the number of files and their median and largest lengths in lines."""
    lines = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    longest = max(lines, key=lines.__getitem__)
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        "median lines": statistics.median(lines.values()),
        "files under 40 lines": sum(count < 40 for count in lines.values()),
        "files over 250 lines": sum(count > 250 for count in lines.values()),
        "longest": f"{longest.relative_to(package)} {lines[longest]}",
    }


def circles(package: pathlib.Path) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or around, late imports included."""
    modules = modules_of(package)
    graph = {name: set(imports_of(path, modules)) - {name} for name, path in modules.items()}
    edges = np.array([[other in graph[name] for other in graph] for name in graph])
    _, groups = scipy.sparse.csgraph.connected_components(edges, connection="strong")
    members = collections.defaultdict(list)
    for name, group in zip(graph, groups, strict=True):
        members[group].append(name)
    return [sorted(group) for group in members.values() if len(group) > 1]


def modules_of(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the files of the package by the names of their modules; a wheel holds `configs/` too, a user's kind."""
    paths = sorted(path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "configs")
    return {name_of(path, package): path for path in paths}


def name_of(path: pathlib.Path, package: pathlib.Path) -> str:
    return ".".join(("mpjax", *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")


def imports_of(path: pathlib.Path, modules) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in modules]
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in modules else node.module for name in inner]
    return found


def files_inside(path: pathlib.Path, modules: dict[str, pathlib.Path]) -> list[tuple[str, str]]:
    """Returns the files in folders of mpjax that a program imports from: (file, name), without a name for all of it."""
    inner = {name for name, file in modules.items() if file.name != "__init__.py" and name.count(".") > 1}
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name in inner]
        elif isinstance(node, ast.ImportFrom):
            named = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found += [(whole, "") if whole in inner else (node.module or "", name) for whole, name in named]
    return [(module, name) for module, name in found if module in inner]


def reaching_inside(package: pathlib.Path) -> str:
    """Counts the test files beside the package that import from files in its folders, and all test files."""
    tests, modules = sorted((package.parent / "tests").rglob("*.py")), modules_of(package)
    return f"{sum(bool(files_inside(path, modules)) for path in tests)} of {len(tests)}"


def single(package: pathlib.Path) -> int:
    """Counts the modules that exactly one other module imports."""
    modules = modules_of(package)
    users = collections.Counter(
        other for name, path in modules.items() for other in {*imports_of(path, modules)} - {name}
    )
    return sum(count == 1 for name, count in users.items() if modules[name].name != "__init__.py")


def names(package: pathlib.Path) -> dict:
    """Counts the class names that stand in several files, and docstrings of functions that open with "Returns"."""
    classes, opening = collections.Counter(), collections.Counter()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        classes.update({node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)})
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        opening.update(text.split()[0] for text in map(ast.get_docstring, functions) if text)
    return {
        "class names in several files": sum(count > 1 for count in classes.values()),
        "docstrings of functions": sum(opening.values()),
        'of these open with "Returns"': opening["Returns"],
    }


def takers_of_config(package: pathlib.Path) -> int:
    """Counts the files with a function that has an argument of type `Config`: rooms of the settings."""

    def takes_it(node: ast.AST) -> bool:
        if not isinstance(node, ast.FunctionDef):
            return False
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return any(argument.annotation and ast.unparse(argument.annotation) == "Config" for argument in arguments)

    return sum(any(map(takes_it, ast.walk(ast.parse(path.read_text())))) for path in package.rglob("*.py"))


def journey(package: pathlib.Path, code: str) -> dict:
    """Runs a program in a process of its own; returns what it executed of the package."""
    with tempfile.TemporaryDirectory() as folder:
        code = code.format(configs=package.parent / "configs", folder=folder) if "{configs}" in code else code
        result = f"{folder}/seen.json"
        indented = "\n".join(f"    {line}" for line in code.splitlines())
        program = WATCHED.format(package=str(package), result=result, code=indented)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=package.parent, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"a journey failed:\n{done.stderr}")
        files, imported = json.loads(pathlib.Path(result).read_text())
    folders = [str(pathlib.Path(file).parent) for file in files]
    changes = sum(one != other for one, other in itertools.pairwise(folders))
    return {"files executed": len(files), "modules imported": imported, "folder changes": changes}


if __name__ == "__main__":
    main()
