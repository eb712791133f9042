"""The commands as a person meets them: help, messages, exit codes, signals."""

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import warnings

import jax
import pytest

from mpjax import cli
from mpjax.config import Config, Duration, Evaluation, OnRay, Plan
from mpjax.errors import Diverged, Interrupted, PrecisionWarning, UsageError, show_warning
from mpjax.loop import complete_checkpoints, read_checkpoint
from mpjax.report import read_metrics


ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"

# About two seconds of training in steps of a fraction of a millisecond.
LONG = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 16
--steps 4000 --optimizer.warmup 10 --precision.initial_scale 16777216 --precision.growth_interval 100
--loop.log_every 50 --loop.eval_every 1000 --loop.save_every 200 --loop.keep 99
--report.no_tensorboard --report.no_plot
""")


def command(script, *arguments, **settings):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *settings.get("python", ()), str(SCRIPTS / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def flags_of(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration):
            yield from flags_of(value, f"{prefix}{field.name}.")
        else:
            yield f"--{prefix}{field.name}"


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        ("train.py", Config()),
        ("evaluate.py", Evaluation(run="a")),
        pytest.param("plan.py", Plan(), marks=pytest.mark.slow),
        pytest.param("train_ray.py", OnRay(), marks=pytest.mark.slow),
    ],
)
def test_help_lists_every_field_and_imports_no_jax(script, settings):
    process = command(script, "--help", python=("-X", "importtime"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not set(re.findall(r"--[\w.]+", " ".join(flags_of(settings)))) - set(re.findall(r"--[\w.]+", out))
    imported = set(re.findall(r"\|\s+([\w.]+)$", err, flags=re.MULTILINE))
    assert "tyro" in imported
    assert not {"jax", "flax", "numpy", "optax", "orbax", "grain", "tensorflow_datasets", "ray"} & imported
    # What the parser would take for a field that is not one of its simple types: a third of the time.
    assert not {"typeguard", "unittest", "asyncio", "rich"} & imported


def program(*arguments):
    """Runs `mpjax` as installed, where the package is imported from this checkout or environment."""
    code = "import sys; from mpjax.cli import main; sys.argv[0] = '/env/bin/mpjax'; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_the_installed_program_is_the_one_that_is_tested():
    (found,) = importlib.metadata.entry_points(group="console_scripts", name="mpjax")
    assert found.load() is cli.main


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_program_lists_its_commands(arguments):
    done = program(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^  ([a-z]\w+)  ", done.stdout, re.MULTILINE) == list(cli.COMMANDS)


def test_each_command_has_a_script_and_the_program_s_name_in_its_help():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(cli.COMMANDS)
    for name in cli.COMMANDS:
        assert getattr(cli, name).args == (name,)
    done = program("export", "--help")
    assert (done.returncode, done.stdout.split("\n")[0][:19]) == (0, "usage: mpjax export")


def test_the_program_tells_its_version():
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"mpjax {importlib.metadata.version('mpjax')}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "error: no command 'trian'; did you mean train? (mpjax --help lists all)"),
        ("--verson", "error: no option '--verson'; did you mean --version? (mpjax --help lists all)"),
        ("xyz", "error: no command 'xyz' (mpjax --help lists all)"),
        ("--print-completion", "error: --print-completion without a shell: wanted bash"),
        (
            "evaluate",
            "error: missing from mpjax evaluate: --run STR Folder of the run. (required) (mpjax evaluate --help",
        ),
        pytest.param(
            "evaluate --run nowhere",
            "error: no run in nowhere (no config.toml); wanted the folder that mpjax train printed",
            marks=pytest.mark.slow,
        ),
        (
            "train --sed 3",
            "error: unrecognized options: --sed, 3; did you mean --seed, --seeds? (mpjax train --help lists all)",
        ),
        pytest.param(
            "compare a", "error: 1 run to compare, a: wanted the folders of two or more", marks=pytest.mark.slow
        ),
    ],
)
def test_the_first_line_says_what_is_wrong_and_names_the_program(arguments, message):
    done = program(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0].startswith(message)


def test_the_program_starts_before_its_parser_is_imported():
    code = "import sys; sys.argv = ['mpjax']; from mpjax.cli import main; main(); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tyro", "mpjax.config", "dataclasses", "jax", "numpy"} & set(done.stderr.split())


def test_help_tells_defaults_and_meanings(capsys):
    assert cli.train(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--config FILE (repeatable) reads settings from a TOML file" in out
    assert "--optimizer.learning_rate FLOAT Peak learning rate. (default: 0.1)" in out
    assert "Steps skipped" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--optimizer.lerning_rate", "3"], "--optimizer.learning_rate FLOAT"),
        (["--model.name", "resnet19"], "no model 'resnet19'; did you mean resnet18?"),
        (["--steps", "thirty"], "bad duration 'thirty': wanted e.g. '500'"),
        (["--steps", "0"], "error: --steps is 0: wanted at least one step"),
        (["--config", "digits.tml"], "error: no config file digits.tml"),
        (["--precision.policy", "mixed_flot16"], "did you mean 'mixed_float16'?"),
        (
            ["--precision.policy", "float32", "--precision.master_weights", "on"],
            "contradicts --precision.policy float32",
        ),
        (["--precision.policy", "O1", "--precision.mode", "module"], "write O2 for the same dtypes set on modules"),
        (["--precision.policy", "O3", "--precision.mode", "autocast"], "contradicts --precision.policy O3"),
        (["--precision.stochastic_rounding"], "and this run has none: write float16 or bfloat16 as the policy"),
        pytest.param(
            ["--precision.tolerance", "1"],
            "wanted tolerance from 0 up to, not including, 1, got 1.0",
            marks=pytest.mark.slow,
        ),
        (["--data.batch_size", "63"], "take a multiple of 2, such as 62"),
        (["--data.name", "mnst"], "data set 'mnst' is not prepared"),
        pytest.param(["--data.train_split", "trian"], "split 'trian' of 'digits/1.0.0'", marks=pytest.mark.slow),
        (["--resume"], "--resume needs --output_dir"),
        (["--output_dir", str(ROOT)], "exists and holds no run to resume: write another --output_dir"),
        (["--data.name", "synthetic:8x8x1:10", "--cache_dir", f"{__file__}/x"], "cannot make folder"),
    ],
)
def test_a_mistake_gets_one_message_and_code_2(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.train(["--model.name", "mlp", "--optimizer.warmup", "1", *arguments]) == 2
    captured = capsys.readouterr()
    message = " ".join(captured.err.replace("│", " ").split())
    assert says in message
    assert "Traceback" not in message
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_results_is_not_written_over(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("seed = 1")
    arguments = ["--model.name", "mlp", "--data.name", "synthetic:8x8x1:10", "--output_dir", str(tmp_path)]
    assert cli.train(arguments) == 2
    assert f"error: {tmp_path} exists: write --resume to resume the run in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_evaluating_a_run_that_is_not_there(tmp_path, capsys):
    assert cli.evaluate(["--run", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: no run in {tmp_path} (no config.toml)")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("wrong"), 2, "error: wrong\n"),
        (Diverged("training diverged"), 3, "error: training diverged\n"),
        (Interrupted("stopped at step 3", signal.SIGINT), 130, "stopped at step 3\n"),
        (Interrupted("stopped at step 3", signal.SIGTERM), 143, "stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device", "a/metrics.jsonl"), 1, None),
        (SystemExit(0), 0, ""),
        (SystemExit("why"), 2, ""),
        (BrokenPipeError(32, "Broken pipe"), 1, "error: [Errno 32] Broken pipe\n"),  # of a socket, not of stdout
    ],
)
def test_exit_codes(error, code, message, capsys):
    def fails():
        raise error

    assert cli.exit_code(fails) == code
    err = capsys.readouterr().err
    assert err == message if message is not None else "No space left on device: 'a/metrics.jsonl'" in err


@pytest.mark.parametrize(
    ("sink", "err"), [("| true", ""), ("> /dev/full", "error: [Errno 28] No space left on device\n")]
)
def test_a_stdout_that_takes_nothing_ends_a_command_with_code_1(sink, err):
    """With Python's usual buffer, which is written at exit."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = f"{sys.executable} {ROOT}/scripts/train.py --help {sink}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, err)


@pytest.mark.parametrize("code", [0, 7])
def test_an_exit_while_a_command_works_is_an_error(code, tmp_path, capsys):
    """`sys.exit` is help while flags are read; from the user's code it would look like a run that is done."""
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\n\ndef data():\n    sys.exit({code})\n")
    assert cli.train(["--data.name", f"{file}:data", "--output_dir", str(tmp_path / "run")]) == 1
    said = (
        f"error: the command ended before it was done: it called sys.exit({code}) (mine.py, line 4); raise an exception"
    )
    assert capsys.readouterr().err.startswith(said)


def test_a_fault_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.exit_code(lambda: 1 // 0)


def test_advice_is_one_line_and_other_warnings_keep_their_place(capsys):
    def warns():
        warnings.warn("the loss is float16", PrecisionWarning, stacklevel=1)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show_warning
            warnings.warn("old", FutureWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always", PrecisionWarning)
        assert cli.exit_code(warns) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "warning: the loss is float16"
    assert "FutureWarning: old" in rest[0]


def test_damaged_compiled_programs_are_said_once_and_removed_so_that_jax_writes_them_again(tmp_path, capsys):
    for name in ("jit_a-01-cache", "jit_a-02-cache", "jit_ab-03-cache"):
        (tmp_path / name).touch()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        for doing in ("reading", "reading", "writing"):
            said = f"Error {doing} persistent compilation cache entry for 'jit_a': Error -3 while decompressing"
            show_warning(said, UserWarning, "compiler.py", 7)
        for sound in ("PermissionError: denied", "JaxRuntimeError: PjRtCompiler must be constructed with a Client"):
            said = f"Error reading persistent compilation cache entry for 'jit_ab': {sound}"
            show_warning(said, UserWarning, "compiler.py", 7)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["jit_ab-03-cache"]
    assert capsys.readouterr().err == (
        f"warning: compiled programs in {tmp_path} are damaged and are compiled again\n"
        f"warning: compiled programs in {tmp_path} cannot be written; they are compiled again each time\n"
        f"warning: compiled programs in {tmp_path} cannot be read; they are compiled again each time\n"
    )


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_code_3(tmp_path, capsys):
    flags = ["--steps", "40", "--precision.policy", "float32", "--optimizer.learning_rate", "1e30"]
    assert cli.train([*LONG, *flags, "--output_dir", str(tmp_path / "a")]) == 3
    err = capsys.readouterr().err
    assert re.match(
        r"error: training diverged at step \d+: loss is nan\nfirst bad layer: .*\nverdict: not_precision", err
    )
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    process = command("train.py", *LONG, "--output_dir", folder)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert "test accuracy" in out
    return folder


def metrics_of(folder, steps):
    times = ("time", "train/examples_per_second")
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in times} for record in records if record["step"] in steps]


ENDS = ((signal.SIGINT, 130, 400), (signal.SIGTERM, 143, 1000), (signal.SIGKILL, -9, 1600))
"""Signals, their exit codes, and the first checkpoint after which each is sent."""


@pytest.mark.slow
def test_a_run_that_is_ended_resumes_and_ends_as_undisturbed(undisturbed, tmp_path):
    """After SIGINT and SIGTERM from the checkpoint that they cause, after SIGKILL from the last complete one."""
    folder, windows, saved, resuming = tmp_path / "run", [], [], ()
    for number, code, position in ENDS:
        process = command("train.py", *(resuming or LONG), "--output_dir", folder)
        out = []
        while max(complete_checkpoints(folder / "checkpoints"), default=0) < position:
            out.append(process.stdout.readline())  # it says every 50 steps where it is
            assert out[-1], process.communicate()
        process.send_signal(number)
        rest, err = process.communicate(timeout=60)
        assert process.returncode == code
        assert not saved or f"resumed from step {saved[-1]}\n" in "".join(out) + rest
        saved = complete_checkpoints(folder / "checkpoints")
        assert position <= saved[-1] < 4000
        assert not (folder / "summary.json").exists()
        if number == signal.SIGKILL:
            assert err == ""
            assert saved[-1] % 200 == 0
        else:
            said, line = err.splitlines()
            assert said == f"stopped at step {saved[-1]}; the checkpoint is saved; to resume:"
            assert shlex.split(line)[2:] == ["--resume", "--output_dir", str(folder)]
        # A stop between two lines of metrics leaves a line of its own.
        windows += range(saved[-1] - saved[-1] % 50, saved[-1] + 50) if saved[-1] % 50 else ()
        resuming = ("--resume",)

    process = command("train.py", *resuming, "--output_dir", folder)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert f"resumed from step {saved[-1]}\n" in out
    (_, one, _), (_, other, _) = (read_checkpoint(f / "checkpoints", "4000") for f in (folder, undisturbed))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name
    steps = [step for step in range(4001) if step not in windows]
    assert metrics_of(folder, steps) == metrics_of(undisturbed, steps)


@pytest.mark.slow
def test_a_float64_run_in_a_process_of_its_own(tmp_path):
    """64-bit arrays are switched on for the whole process, before the first array."""
    flags = ["--steps", "20", "--precision.policy", "float64", "--training.ema", "0.9"]
    process = command("train.py", *LONG, *flags, "--output_dir", tmp_path / "a")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    arrays = read_checkpoint(tmp_path / "a" / "checkpoints")[1]
    dtypes = {str(value.dtype) for name, value in arrays.items() if name.startswith(("params/", "ema/"))}
    assert dtypes == {"float64"}
