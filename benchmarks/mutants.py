"""Measures which small faults the tests notice: a mutant is a module with one operator, number or branch changed.

The mutants are those of cosmic-ray. A process that has imported JAX and the libraries, but started no backend, forks
for each of them: the child imports the mutated module in the place of the real one and runs the module's tests until
the first failure. Processes that a test starts import the real one.

    pip install -e ".[test,bench]"
    python benchmarks/mutants.py --output mutants.json                            all modules, 60 mutants of each
    python benchmarks/mutants.py mpjax/precision/rules.py --most 15 --output rules.json
    python benchmarks/mutants.py --count                                          how many there are, nothing is run
    python benchmarks/mutants.py --only mutants.json --tests tests/docs --output others.json
                                                                                  do other tests kill the survivors?

A second run with the same --output goes on where the first was stopped. It decides anew what has other tests now, and
all of a module that has changed; not what has the same tests with other contents: for that there is --only. Run it in
a checkout that nobody edits meanwhile: an error in a test that is being written would kill every mutant.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import gc
import hashlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]


REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

# The tests of each module by the names of their files, in the order in which they run: the mirrored ones first, then
# others that call it, those that are fast or find much before the rest.
SCALING = (
    "precision/scaled_loss training/state precision/accumulation precision/skip_step precision/scale_state "
    "precision/loss_scale precision/master precision/moments training/train_step"
)
RULES = (
    "precision/rules precision/policy precision/scopes training/precision_plan precision/presets "
    "precision/casting/model_arguments precision/modules precision/casting/transform"
)
CASTING = (
    "precision/casting/jaxprs precision/casting/operations precision/casting/interpreter precision/casting/transform "
    "precision/casting/numbers precision/casting/explicit_dtypes precision/casting/control_flow "
    "precision/casting/derivatives precision/casting/programs precision/dtype_audit precision/casting/libraries "
    "precision/casting/models"
)
TARGETS = {
    "mpjax/precision/loss_scale.py": f"precision/loss_scale {SCALING}",
    "mpjax/precision/skip_step.py": f"precision/skip_step {SCALING}",
    "mpjax/precision/policy.py": f"precision/policy {RULES}",
    "mpjax/precision/presets.py": RULES,
    "mpjax/precision/rules.py": RULES,
    "mpjax/training/train_step.py": "training/train_step training/metrics training/state training/train_call "
    "training/structure precision/scaled_loss training/setup",
}
TARGETS["mpjax/training/gradients.py"] = TARGETS["mpjax/training/train_step.py"]
for _path in sorted((REPOSITORY / "mpjax/precision/casting").glob("[!_]*.py")):
    _mirrored = f"precision/casting/{_path.stem}"
    if not (REPOSITORY / f"tests/precision/casting/test_{_path.stem}.py").exists():
        _mirrored = "precision/dtype_audit"  # which reads the lines that equations come from
    TARGETS[f"mpjax/precision/casting/{_path.name}"] = f"{_mirrored} {CASTING}"

# Of a comparison its opposite and its borders; of arithmetic one other, as a second would tell nothing more.
PAIRS = {
    "Binary": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitAnd_BitOr BitOr_BitAnd BitXor_BitAnd",
    "Comparison": "Eq_NotEq Eq_LtE Eq_GtE NotEq_Eq NotEq_Lt NotEq_Gt Lt_GtE Lt_LtE Lt_NotEq LtE_Gt LtE_Lt LtE_Eq "
    "Gt_LtE Gt_GtE Gt_NotEq GtE_Lt GtE_Gt GtE_Eq Is_IsNot IsNot_Is",
    "Unary": "Delete_USub Delete_Invert Delete_Not",
}
OPERATORS = (
    *(f"Replace{kind}Operator_{pair}" for kind, pairs in PAIRS.items() for pair in pairs.split()),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "NumberReplacer", "RemoveDecorator"),
)
OPPOSITES = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is}

LIBRARIES = ("numpy", "pytest", "hypothesis", "jax", "jmp", "optax", "flax.nnx", "flax.linen", "equinox", "haiku")


class Mutant(NamedTuple):
    """A module with one change; without an operator, the module as it is."""

    module: str
    tests: tuple[str, ...]
    source: str
    operator: str = ""
    line: int = 0
    before: str = ""
    after: str = ""

    @property
    def key(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    def shown(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("line", "operator", "before", "after")}


def mutants_of(original: Mutant) -> list[Mutant]:
    """All mutants of a module that mean something else than the module, and than each other."""
    tree, old = get_ast(original.source), original.source.splitlines()
    meanings, found = {_meaning(original.source)}, []
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        # In the order in which cosmic-ray counts occurrences.
        nodes = [node for node in ast_nodes(tree) for _ in operator.mutation_positions(node)]
        for occurrence, node in enumerate(nodes):
            if node.parent is not None and node.parent.type == "parameters":
                continue  # the star before keyword arguments, which cosmic-ray takes for a product
            source: Any = mutate_code(original.source, operator, occurrence)
            try:
                meaning = _meaning(source)
            except SyntaxError:
                continue
            if meaning not in meanings:
                meanings.add(meaning)
                diff = list(difflib.unified_diff(old, source.splitlines(), n=0, lineterm=""))[3:]
                lines = ("\n".join(line[1:] for line in diff if line.startswith(sign)) for sign in "-+")
                found.append(Mutant(*original[:2], source, name, node.start_pos[0], *lines))
    return found


class _Plain(ast.NodeTransformer):
    """Takes away what does not count (annotations, code for type checkers), and writes equal conditions alike.

    Nor does the `strict` of a zip count, which asserts what is so: no test can tell whether it is there.
    """

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return ast.Pass()
        vars(node).update({field: None for field in ("annotation", "returns") if field in node._fields})
        match self.generic_visit(node):
            case ast.keyword("strict"):
                return ast.keyword("strict", ast.Constant(None))
            case ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), operand)):
                return operand
            case ast.UnaryOp(ast.Not(), ast.Compare(left, [op], right)) if type(op) in OPPOSITES:
                return ast.Compare(left, [OPPOSITES[type(op)]()], right)
        return node


def _meaning(source: str) -> str:
    return ast.dump(_Plain().visit(ast.parse(source)))


class _Importer(importlib.machinery.SourceFileLoader):
    """Finds one module, and loads it from the source of a mutant."""

    def __init__(self, mutant: Mutant):
        super().__init__(mutant.module.removesuffix(".py").replace("/", "."), str(REPOSITORY / mutant.module))
        self.source = mutant.source

    def find_spec(self, name: str, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str):
        return compile(self.source, self.path, "exec", dont_inherit=True)  # whatever bytecode there is beside the file


def prepare(root: pathlib.Path, programs: str, folder: str) -> None:
    """Imports what all children need, and sets what they find in the environment; starts no backend of JAX."""
    os.environ |= {"MPJAX_TEST_PROGRAMS": programs, "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis"}
    os.chdir(root)
    sys.path[0] = str(REPOSITORY)  # instead of this folder, whose modules have names that others may have
    # JAX reads its settings when it is imported: those that tests/conftest.py makes before it imports JAX.
    body = ast.parse((root / "tests/conftest.py").read_text()).body
    settings = itertools.takewhile(lambda line: ast.unparse(line) != "import jax", body)
    exec(compile(ast.Module([*settings], []), "tests/conftest.py", "exec"), {})
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # no child looks at these objects again


def _child(mutant: Mutant, folder: str) -> int:
    """Forks; the child ends with pytest's exit status."""
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        os.setsid()  # so that what a test has started can be ended with it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if mutant.operator:
            sys.meta_path.insert(0, _Importer(mutant))
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder}"]
        # Pytest would have imported its plugins itself, to rewrite their assertions.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = int(sys.modules["pytest"].main([*options, *mutant.tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def outcomes(
    mutants: Iterable[Mutant], jobs: int, limit: Callable[[Mutant], float], folder: str
) -> Generator[tuple[Mutant, dict, str]]:
    """Each mutant when it is decided, with verdict, seconds and who killed it; and what pytest printed.

    `limit` has the seconds after which a mutant is given up.
    """
    waiting, running = collections.deque(enumerate(mutants)), {}
    clock, looked = 0.0, time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, mutant = waiting.popleft()
                running[_child(mutant, f"{folder}/{number}")] = mutant, f"{folder}/{number}", clock
            time.sleep(0.02)
            # Not what the machine slept through, when no test ran either.
            clock, looked = clock + min(time.monotonic() - looked, 1.0), time.monotonic()
            for process, (mutant, place, begun) in list(running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                taken = clock - begun
                if not ended and taken < limit(mutant):
                    continue
                _end(process, reap=not ended)
                del running[process]
                output = pathlib.Path(f"{place}.txt")
                printed = output.read_text(errors="replace") if output.exists() else ""
                output.unlink(missing_ok=True)
                shutil.rmtree(place, ignore_errors=True)
                code = os.waitstatus_to_exitcode(status)
                failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
                by = failed[0].split(" - ")[0] if failed else f"exit status {code}"
                verdict, by = ("killed", by) if code else ("survived", "")
                if not ended:
                    verdict, by = "timeout", f"{limit(mutant):g} s"
                yield mutant, {"verdict": verdict, "seconds": round(taken, 1), "by": by}, printed
    finally:
        for process in running:
            _end(process, reap=True)


def _end(process: int, reap: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # with what it has started
    if reap:
        os.kill(process, signal.SIGKILL)  # it may not have had the time to become the head of a group
        os.waitpid(process, 0)


def write(path: pathlib.Path | None, targets: dict[str, dict]) -> None:
    """Counts verdicts, and writes them to a file that is whole at all times."""
    for target in targets.values():
        decided = sorted(target["decided"].values(), key=lambda one: one["line"])
        verdicts = collections.Counter(one["verdict"] for one in decided)
        target |= {"mutants": len(decided), "killed": len(decided) - verdicts["survived"]}
        survivors = [one for one in decided if one["verdict"] == "survived"]
        target |= {
            "timeouts": verdicts["timeout"],
            "survivors": [{name: one[name] for name in ("line", "operator", "before", "after")} for one in survivors],
        }
    if path:
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps({"targets": targets}, indent=1) + "\n")
        new.replace(path)


def table(targets: dict[str, dict]) -> str:
    """What is decided, in Markdown."""
    rows = [(name, one["mutants"], one["killed"]) for name, one in targets.items()]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    lines = [f"| {name} | {mutants} | {killed} | {mutants - killed} |" for name, mutants, killed in rows]
    return "\n".join(["| module | mutants | killed | survivors |", "|---|---:|---:|---:|", *lines])


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended
    output = arguments.output and arguments.output.resolve()
    targets = json.loads(output.read_text())["targets"] if output and output.exists() else {}
    only = json.loads(arguments.only.read_text())["targets"] if arguments.only else {}
    originals, undecided = [], []
    for module in arguments.modules or only or TARGETS:
        tests = arguments.tests or [
            f"tests/{'/test_'.join(name.rsplit('/', 1))}.py" for name in TARGETS[module].split()
        ]
        original = Mutant(module, tuple(dict.fromkeys(tests)), (REPOSITORY / module).read_text())
        mutants = mutants_of(original)
        possible = len(mutants)
        if arguments.count:
            print(f"{module}: {possible}")
            continue
        if only:
            wanted = only[module]["survivors"]
            mutants = [mutant for mutant in mutants if mutant.shown() in wanted]
            if len(mutants) < len(wanted):
                print(f"{module}: {len(wanted) - len(mutants)} of {len(wanted)} survivors can no longer be made")
        else:
            random.Random(arguments.seed).shuffle(mutants)  # with a larger --most, these and others
            del mutants[arguments.most :]
        before = targets.get(module, {"tests": (), "decided": {}})
        kept = before["decided"] if before["tests"] == list(original.tests) else {}
        decided = {mutant.key: kept[mutant.key] for mutant in mutants if mutant.key in kept}
        targets[module] = {"tests": original.tests, "seconds": before.get("seconds"), "possible": possible}
        targets[module]["decided"] = decided
        open_ = [mutant for mutant in mutants if mutant.key not in decided]
        originals += [original] if open_ else []
        undecided += open_
    if arguments.count:
        return
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        programs = arguments.programs.resolve() if arguments.programs else f"{folder}/programs"
        prepare(arguments.root.resolve(), str(programs), folder)
        # Once where modules have the same tests. It also compiles what the mutants find compiled, and may take longer.
        distinct = {frozenset(original.tests): original for original in originals}
        with contextlib.closing(outcomes(distinct.values(), arguments.jobs, lambda _: 3600, folder)) as ended:
            for one, outcome, printed in ended:
                if outcome["verdict"] != "survived":
                    sys.exit(f"{printed}\nThe tests of {one.module} do not pass without a mutant: {outcome['by']}")
                print(f"{one.module} as it is: {outcome['seconds']} s", flush=True)
                for original in originals:
                    if set(original.tests) == set(one.tests):
                        targets[original.module]["seconds"] = outcome["seconds"]

        def limit(mutant: Mutant) -> float:
            return arguments.times * targets[mutant.module]["seconds"] + 30

        with contextlib.closing(outcomes(undecided, arguments.jobs, limit, folder)) as ended:
            for number, (mutant, outcome, _) in enumerate(ended, start=1):
                targets[mutant.module]["decided"][mutant.key] = mutant.shown() | outcome
                write(output, targets)
                said = f"{outcome['verdict']} in {outcome['seconds']} s {outcome['by']}"
                print(f"{number}/{len(undecided)} {mutant.module}:{mutant.line} {mutant.operator} {said}", flush=True)
    write(output, targets)
    print(table(targets))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="by default all that this file lists")
    parser.add_argument("--output", type=pathlib.Path, help="JSON, written after each mutant")
    parser.add_argument("--most", type=int, default=60, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="which they are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument(
        "--times", type=float, default=3, help="a mutant that takes so many times as long as no mutant counts as killed"
    )
    parser.add_argument("--programs", type=pathlib.Path, help="folder of compiled programs, kept for the next run")
    parser.add_argument("--only", type=pathlib.Path, help="run the survivors in the output of another run")
    parser.add_argument("--tests", nargs="+", help="instead of the modules' own, relative to --root")
    parser.add_argument("--root", type=pathlib.Path, default=REPOSITORY, help="checkout that the tests are of")
    parser.add_argument("--count", action="store_true", help="say how many mutants there are")
    arguments = parser.parse_args()
    if arguments.only and arguments.output and arguments.only.resolve() == arguments.output.resolve():
        parser.error("--output would replace what --only reads: give it another name")
    return arguments


if __name__ == "__main__":
    main()
