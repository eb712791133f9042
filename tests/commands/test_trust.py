"""A run from elsewhere: each attempt to run code, to reach files elsewhere or to command a terminal is refused.

The attempts are made from the schema of the settings, the table of commands and the table of a run's files.
"""

import ast
import dataclasses
import inspect
import os
import pathlib
import re
import tempfile

import jax
import pytest

from mpjax import cli, strict_json
from mpjax.commands import compare_runs, set_up_jax
from mpjax.config import (
    CODE,
    Compare,
    Config,
    cache_folder,
    check_run_folder,
    config_of_run,
    forget_files,
    from_toml,
    load_config,
    load_function,
    program_folder,
    schema,
    to_toml,
)
from mpjax.errors import UsageError
from mpjax.plan import compiler
from mpjax.training import plan_precision


PACKAGE = pathlib.Path(cli.__file__).parent
DOCS = pathlib.Path(__file__).parents[2] / "docs"

# Settings


def text_settings(section=None, prefix=""):
    """The settings that hold text, by name, with their defaults."""
    section, found = section or Config(), {}
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), prefix + field.name
        if type(value).__module__ == schema.__name__:
            found |= text_settings(value, f"{name}.")
        elif isinstance(value, str | tuple | dict):
            found[name] = value
    return found


def described_as_code():
    """The settings whose description offers `FILE.py:NAME`, or names that another setting has."""
    sections = {type(getattr(Config(), field.name)): f"{field.name}." for field in dataclasses.fields(Config)}
    for node in ast.walk(ast.parse(inspect.getsource(schema))):
        kind = getattr(schema, node.name, None) if isinstance(node, ast.ClassDef) else None
        if kind in sections:
            for setting, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(setting, ast.AnnAssign) and re.search("FILE.py:NAME|named as in", ast.unparse(text)):
                    yield sections[kind] + setting.target.id


def with_setting(config, name, value):
    """The settings with one of them changed to a text, in the form that it has."""
    section, _, field = name.rpartition(".")
    old = getattr(getattr(config, section) if section else config, field)
    new = {value: 0.5} if isinstance(old, dict) else (value,) if isinstance(old, tuple) else value
    inner = dataclasses.replace(getattr(config, section) if section else config, **{field: new})
    return dataclasses.replace(config, **{section: inner}) if section else inner


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config if isinstance(config, str) else next(iter(config))


# Code


def test_each_setting_that_offers_code_is_marked_in_a_stored_run():
    assert {*described_as_code()} == {*CODE}


LOADERS = ("exec_module", "import_module", "__import__", "eval", "exec", "run_path", "load_module")


def test_one_function_loads_code_and_is_asked_for_these_settings_alone():
    loads, asked = set(), set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name in LOADERS and not ast.unparse(node.func).endswith("model.eval"):
                loads.add(file.relative_to(PACKAGE).as_posix())
            if name == "load_function":
                flags = [word.value for word in node.keywords if word.arg == "flag"]
                asked |= {flag.value.removeprefix("--") for flag in flags if isinstance(flag, ast.Constant)}
    # These import modules of mpjax, of JAX and of a logger by names in their own text.
    layouts = "models/pretrained/layouts/families.py"
    of_constants = {"offers.py", "cli.py", "jax_internals.py", "report/loggers/comet.py", layouts}
    assert loads - of_constants == {"config/user_code.py"}
    assert asked <= {*CODE}
    assert len(asked) >= 8  # the others are asked for by the names in a constant


PREFIXES = ["", "hf:", "folder:", "synthetic:", "mpjax:", "python:", "./"]
ELSEWHERE = [
    "os:system",
    "mpjaxevil:f",
    "mpjax.py:f",
    "mpjax.evil.py:f",
    "mpjax.cli:main",
    "mpjax.files:os",
    "mpjax.models.pretrained:export",
    "mpjax:run",
]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Writes a run's folder with settings, in a folder with a file that leaves a trace when it is executed."""
    monkeypatch.chdir(tmp_path)
    for name in ("evil.py", *(f"{prefix}evil.py" for prefix in PREFIXES if prefix.endswith(":"))):
        pathlib.Path(name).write_text("import pathlib; pathlib.Path('trace').touch()\ndef f(*a, **k): pass\n")

    def write(config, name="run"):
        (tmp_path / name / "checkpoints").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.toml").write_text(to_toml(dataclasses.replace(config, trust_code=True)))
        return pathlib.Path(name)

    return write


def naming_code(spec):
    """The settings of which each that may name code names this."""
    config = Config()
    for setting in CODE:
        config = with_setting(config, setting, spec)
    return config


READ = {
    "--run": config_of_run,
    "from_toml": lambda run: from_toml(run / "config.toml"),
    "--resume": lambda run: load_config(["--resume", "--output_dir", str(run)]),
    "--config": lambda run: load_config(["--config", str(run / "config.toml")]),
}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[] if spec in ("evil.py:f", "hf:evil.py:f", "os:system") else pytest.mark.slow)
        for spec in (*(f"{prefix}evil.py:f" for prefix in PREFIXES), *ELSEWHERE)
    ],
)
def test_no_setting_of_a_stored_run_loads_code_under_any_name(stored, spec):
    run = stored(naming_code(spec))
    config = from_toml(run / "config.toml")
    for setting in CODE:
        with pytest.raises(UsageError, match=r"write --trust_code|was given this in Python"):
            load_function(value_of(config, setting), flag=f"--{setting}")
    with pytest.raises(UsageError, match=r"write --trust_code|was given parts in Python"):
        config_of_run(run)
    assert not pathlib.Path("trace").exists()


def test_trusted_code_is_loaded(stored):
    config = config_of_run(stored(naming_code("evil.py:f")), trust_code=True)
    for setting in CODE:
        forget_files()
        load_function(value_of(config, setting), flag=f"--{setting}")
        pathlib.Path("trace").unlink()


def test_a_file_that_was_executed_is_refused_to_a_stored_run_all_the_same(stored):
    config = from_toml(stored(naming_code("evil.py:f")) / "config.toml")
    load_function("evil.py:f", flag="--model.name")
    for setting in CODE:
        with pytest.raises(UsageError, match=r"evil.py:f is code that a stored run names"):
            load_function(value_of(config, setting), flag=f"--{setting}")


REQUIRED = {"export": ["--output", "w.safetensors"], "plan": ["--gpu", "h100"], "predict": ["--split", "test"]}
COMMANDS = [
    (name, form)
    for name, command in cli.COMMANDS.items()
    for kind in map(cli.imported, command.settings)
    for field in dataclasses.fields(kind)
    for form in {"run": ["--run"], "resume": ["--resume --output_dir", "--config"]}.get(field.name, ())
]


EACH_WAY = {("evaluate", "--run"), ("train", "--resume --output_dir"), ("train", "--config")}


@pytest.mark.parametrize(
    ("command", "form"), [pytest.param(*case, marks=[] if case in EACH_WAY else pytest.mark.slow) for case in COMMANDS]
)
def test_no_command_executes_what_a_stored_run_names(stored, capsys, command, form):
    run = stored(naming_code("evil.py:f"))
    argument = run / "config.toml" if form == "--config" else run
    assert cli.call(command, [*form.split(), str(argument), *REQUIRED.get(command, ())]) == 2
    told = capsys.readouterr().err
    assert f"here: {', '.join(f'{setting} evil.py:f' for setting in CODE)}; read it, and if you trust it" in told
    assert not pathlib.Path("trace").exists()


LEFT = re.findall(r"`([^`/]+)/?`", " ".join(re.findall(r"^\| (`.*?) \|", (DOCS / "training.md").read_text(), re.M)[:8]))


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(name, marks=[] if name in ("checkpoints", "metrics.jsonl") else pytest.mark.slow)
        for name in (*LEFT, "seed_0")
        if name[-4:] not in ("toml", ".png")
    ],
)
def test_settings_beside_anything_that_a_run_leaves_are_those_of_a_run(tmp_path, monkeypatch, beside):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("config.toml").write_text(to_toml(with_setting(Config(), "model.name", "evil.py:f")))
    load_config(["--config", "config.toml"])  # a file of one's own
    pathlib.Path(beside).symlink_to("nowhere")
    with pytest.raises(UsageError, match="--trust_code"):
        load_config(["--config", "config.toml"])


# Caches


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_no_cache_comes_from_a_stored_run(stored, read):
    assert read(stored(dataclasses.replace(Config(), cache_dir="/evil"))).cache_dir == ""


def test_the_cache_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = cache_folder(Config(cache_dir=str(tmp_path / "new" / "cache")))
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]


@pytest.fixture
def entered():
    """A folder that others can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield pathlib.Path(name)


OTHERS = 54321  # no user and no group has this number
SHARES = [  # mode, owner, group; can others change what the user has in the folder, and the folder itself?
    (0o700, -1, -1, False, False),
    (0o755, -1, -1, False, False),
    (0o777, -1, -1, True, True),
    (0o757, -1, -1, True, True),
    (0o1777, -1, -1, False, True),
    (0o775, -1, OTHERS, True, True),
    (0o1775, -1, OTHERS, False, True),
    (0o770, -1, OTHERS, True, True),
    (0o750, -1, OTHERS, False, False),
    (0o700, OTHERS, -1, True, True),
    (0o1777, OTHERS, -1, True, True),
]


def share(folder, mode, owner, group):
    if (owner, group) != (-1, -1) and os.geteuid() != 0:
        pytest.skip("root alone gives folders away")
    os.chown(folder, owner, group)
    folder.chmod(mode)


@pytest.mark.parametrize("path", ["shared", "shared/below/cache", "link"])
@pytest.mark.parametrize(("mode", "owner", "group", "inside", "itself"), SHARES)
def test_compiled_programs_are_in_no_folder_that_others_can_change(
    entered, capsys, path, mode, owner, group, inside, itself
):
    shared = entered / "shared"
    shared.mkdir()
    (entered / "link").symlink_to(shared)
    programs = entered / path / "compiled"
    programs.mkdir(parents=True, mode=0o755)
    for place, refused in ((programs, itself), (shared, inside)):
        share(place, mode, owner, group)
        folder = program_folder(Config(cache_dir=str(entered / path)))
        advice = f"belongs to user {OTHERS}: write " if owner > 0 else f"write chmod go-w {place.resolve()}, or "
        told = capsys.readouterr().err
        assert folder == (None if refused else programs)
        assert f"{advice}another --cache_dir" in told if refused else not told
        share(place, 0o755, os.geteuid(), os.getegid())


def test_compiled_programs_are_behind_no_link_that_others_can_replace(entered, capsys):
    private, between = entered / "private", entered / "between"
    private.mkdir()
    between.mkdir()
    (between / "second").symlink_to("../private")
    (entered / "first").symlink_to(between / "second")
    between.chmod(0o777)
    assert program_folder(Config(cache_dir=str(entered / "first"))) is None
    assert f"other users can write in {between}: write chmod go-w {between}, or another" in capsys.readouterr().err


def test_programs_are_not_used_beside_one_that_another_user_has_left(entered, capsys):
    program = program_folder(Config(cache_dir=str(entered))) / "program"
    program.touch()
    share(program, 0o644, OTHERS, -1)
    assert program_folder(Config(cache_dir=str(entered))) is None
    assert f"{program} belongs to user {OTHERS}: remove it, or write another --cache_dir" in capsys.readouterr().err


def test_a_folder_of_which_others_cannot_enter_a_parent_is_private(entered, capsys):
    cache = entered / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    entered.chmod(0o700)
    assert program_folder(Config(cache_dir=str(cache))) == cache / "compiled"
    assert capsys.readouterr().err == ""


def test_a_run_leaves_alone_programs_that_others_can_change(entered):
    """JAX's own variable can name such a folder all the same."""
    entered.chmod(0o777)
    before = jax.config.jax_compilation_cache_dir
    set_up_jax(Config(cache_dir=str(entered)), plan_precision(Config().precision))
    assert jax.config.jax_compilation_cache_dir == before


def test_a_compiler_that_others_can_change_is_not_loaded(entered, monkeypatch):
    monkeypatch.setenv("MPJAX_CACHE", str(entered))
    monkeypatch.setattr(compiler, "require_compiler", lambda: None)
    monkeypatch.setattr(compiler, "_version", lambda package: None)
    library = compiler.compiler_folder() / compiler.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    entered.chmod(0o777)
    with pytest.raises(UsageError, match=f"is not loaded: other users can write in {entered}: write chmod go-w"):
        compiler.load_compiler()


# Links


@pytest.mark.parametrize("kind", ["file", "folder", "nowhere", "pipe"])
@pytest.mark.parametrize("name", [*LEFT, "wandb", "wandb_id", "mlflow_id", "tensorboard/events", "checkpoints/3/d/0"])
def test_a_link_or_pipe_in_a_run_is_refused_before_anything_is_read_or_written(stored, name, kind):
    run, other = stored(Config()), stored(Config(), "other")
    for each in (run, other):
        (each / "metrics.jsonl").touch()
    pathlib.Path("folder").mkdir()
    pathlib.Path("file").write_text(to_toml(Config()))
    place = run / name
    place.parent.mkdir(exist_ok=True, parents=True)
    place.rmdir() if place.is_dir() else place.unlink(missing_ok=True)
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(pathlib.Path(kind).absolute())
    for read in (
        lambda: config_of_run(run, trust_code=True),
        lambda: check_run_folder(Config(output_dir=str(run), resume=True)),
        lambda: compare_runs(Compare(runs=(str(run), str(other)))),
    ):
        # A link to nowhere, or to a folder, in place of a file that is needed is no file; nor is a pipe.
        with pytest.raises(UsageError, match=rf"{place} is a (link|pipe).*: wanted the file itself|no run in run \("):
            read()
    assert list(pathlib.Path("folder").iterdir()) == []
    assert pathlib.Path("file").read_text() == to_toml(Config())
    assert not pathlib.Path("nowhere").exists()


def test_links_of_another_program_stay_its_own(stored):
    run = stored(Config())
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("run-1")
    config_of_run(run)


# Names

COMMAND = "\x1b]0;\x07\x1b[2J\x9b2J"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


TEXTS = [name for name in text_settings() if name not in ("output_dir", "cache_dir")]
QUICK = ("data.name", "precision.rules")


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TEXTS]
)
def test_no_text_of_a_stored_run_commands_the_terminal(stored, capsys, setting):
    """Two runs without checkpoints, which differ in one setting."""
    other = with_setting(Config(model=schema.Model(name="mlp")), setting, COMMAND)
    for name, config in (("a", Config(model=schema.Model(name="mlp"))), ("b", other)):
        run = stored(config, name)
        (run / "metrics.jsonl").write_text(strict_json.encode({"step": 1, "time": 1.0, "train/loss": 1.0}) + "\n")
    for command in (["evaluate", "--run", "b"], ["compare", "a", "b", "--plot", ""]):
        cli.call(command[0], command[1:])
        told = capsys.readouterr()
        assert not CONTROL.search(told.out + told.err)


def test_json_has_no_character_that_a_terminal_obeys():
    assert strict_json.encode({COMMAND: 1}) == '{"\\u001b]0;\\u0007\\u001b[2J\\u009b2J": 1}'
    assert strict_json.decode(strict_json.encode({COMMAND: 1})) == {COMMAND: 1}
