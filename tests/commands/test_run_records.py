"""What the folder of a resumed run says of its steps: what happened, and not what was asked last."""

import contextlib
import json
import shlex
import shutil

import pytest

from mpjax.commands import Records, compare_runs, diagnose_run, evaluate_run, run
from mpjax.config import Compare, Diagnose, Evaluation, load_config
from mpjax.errors import CheckpointWarning, PrecisionWarning, UsageError
from mpjax.files import write_atomically
from mpjax.loop import read_checkpoint
from mpjax.report import read_history


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 6 --optimizer.learning_rate 0.01 --optimizer.warmup 1 --optimizer.schedule constant --precision.policy float32
--loop.log_every 2 --loop.eval_every 3 --loop.save_every 3 --loop.keep 9 --report.no_tensorboard --report.no_plot
""")
FLOAT32 = "params=float32,compute=float32,output=float32"
BFLOAT16 = "params=float32,compute=bfloat16,output=float32"


def resume(folder, *flags):
    return run(load_config(["--resume", "--output_dir", str(folder), *flags]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(load_config([*SMALL, "--output_dir", str(folder)]))
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def stopped(folder):
    """The run as it would be had it been killed after its checkpoint of step 3."""
    shutil.rmtree(folder / "checkpoints" / "6")
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["", "--steps 4", "--optimizer.learning_rate 3 --precision.policy bfloat16 --seed 4 --loop.best loss"]
)
def test_a_resume_that_runs_no_step_changes_nothing(folder, flags):
    before = contents(folder)
    assert resume(folder, *flags.split())["policy"] == FLOAT32
    assert contents(folder) == before


def refusing(where, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(where, refuse)


@pytest.mark.slow
@pytest.mark.parametrize("error", [UsageError("no"), KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize(
    "where",
    [
        "mpjax.commands.train.compile_calls",
        "mpjax.commands.receipt_of_run.receipt_of",
        "mpjax.commands.train.require_memory",
        "mpjax.commands.train.Checkpoints",
        "mpjax.commands.train.train_loop",
    ],
)
def test_a_resume_that_ends_before_its_first_step_changes_no_record(stopped, monkeypatch, where, error):
    records = ("config.toml", "environment.json", "history.jsonl", "receipt.json")
    before = {name: (stopped / name).read_bytes() for name in records}
    refusing(where, monkeypatch, error)
    with contextlib.suppress(UsageError, KeyboardInterrupt, RuntimeError):
        resume(stopped, "--optimizer.learning_rate", "3", "--precision.strict")
    assert {name: (stopped / name).read_bytes() for name in records} == before
    assert not (stopped / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_a_process_that_is_killed_between_two_records_leaves_a_history_that_the_next_one_replaces(
    stopped, monkeypatch, count
):
    """The first step has run; no checkpoint of it is there."""
    write, written = write_atomically, []

    def killed(file, content):
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(file.name)
        write(file, content)

    with monkeypatch.context() as patched:
        patched.setattr("mpjax.commands.run_records.write_atomically", killed)
        with contextlib.suppress(KeyboardInterrupt):
            resume(stopped, "--precision.policy", "mixed_bfloat16", "--steps", "5")
    assert written == ["history.jsonl", "config.toml", "environment.json", "receipt.json"][:count]
    shutil.rmtree(stopped / "checkpoints" / "5", ignore_errors=True)  # of the run that was not killed
    resume(stopped, "--precision.policy", "mixed_bfloat16", "--steps", "5")
    history = read_history(stopped / "history.jsonl")
    assert [(line["step"], line["policy"]) for line in history] == [(0, FLOAT32), (3, BFLOAT16)]
    assert history[1]["changed"] == {"precision.policy": ["float32", "mixed_bfloat16"], "steps": ["6", "5"]}


@pytest.mark.slow
def test_a_run_whose_policy_changed_says_so_wherever_it_is_told(stopped, whole, capsys):
    summary = resume(stopped, "--precision.policy", "mixed_bfloat16", "--report.plot", "--report.plot_format", "svg")
    policies = f"{FLOAT32} to step 3, then {BFLOAT16}"
    assert summary["policy"] == policies
    assert summary["changed"] == {"3": "precision.policy mixed_bfloat16, before float32"}
    printed = capsys.readouterr().out
    assert f"policy          {policies}" in printed
    assert "from step 3     precision.policy mixed_bfloat16, before float32" in printed
    drawn = (stopped / "curves.svg").read_text()
    assert "mlp on synthetic:8x8x1:10, float32 to step 3, then mixed_bfloat16" in drawn
    assert "Dashed, from step 3: precision.policy mixed_bfloat16, before float32." in drawn
    found = read_history(stopped / "history.jsonl")
    assert [sorted(line) for line in found] == [sorted(found[0])] * 2
    assert found[1]["packages"]["jax"]
    assert found[1]["devices"] == ["cpu"] * len(found[1]["devices"])
    assert 0 < found[1]["seconds_before"] < summary["seconds"]
    # A checkpoint holds the history of its own steps.
    assert read_checkpoint(stopped / "checkpoints", "6")[2]["history"] == found
    assert read_checkpoint(stopped / "checkpoints", "3")[2]["history"] == found[:1]
    evaluate_run(Evaluation(run=str(stopped), checkpoint="latest"))
    evaluate_run(Evaluation(run=str(stopped), checkpoint="3"))
    printed = capsys.readouterr().out
    assert f"trained under {policies}, evaluated under" in printed
    assert f"trained under {FLOAT32}, evaluated under" in printed
    with pytest.warns(PrecisionWarning, match="step 3 ran under other .*: from step 3: precision.policy mixed"):
        diagnose_run(Diagnose(run=str(stopped), step=3, search="none"))
    diagnose_run(Diagnose(run=str(stopped), step=4, search="none"))
    compared = compare_runs(Compare(runs=(str(whole), str(stopped)), metrics=("train/loss",), plot=""))
    assert [group["name"] for group in compared["groups"]] == [
        "precision.policy=float32",
        "precision.policy=float32 to step 3, then mixed_bfloat16",
    ]


@pytest.mark.slow
def test_a_resume_with_the_same_settings_adds_a_line_and_changes_no_label(stopped, whole):
    assert "changed" not in resume(stopped)
    history = read_history(stopped / "history.jsonl")
    assert [(line["step"], line["changed"]) for line in history] == [(0, {}), (3, {})]
    summaries = [json.loads((each / "summary.json").read_text()) for each in (stopped, whole)]
    assert summaries[0]["policy"] == summaries[1]["policy"] == FLOAT32


@pytest.mark.slow
def test_a_checkpoint_of_before_a_change_is_of_this_run(stopped, recwarn):
    resume(stopped, "--seed", "4")
    evaluate_run(Evaluation(run=str(stopped), checkpoint="3"))
    assert [warning for warning in recwarn if issubclass(warning.category, CheckpointWarning)] == []


@pytest.mark.slow
def test_a_lost_history_is_written_again_from_the_checkpoint(stopped):
    resume(stopped, "--steps", "4", "--precision.policy", "mixed_bfloat16")
    (stopped / "history.jsonl").unlink()
    resume(stopped, "--steps", "5")
    assert [line["policy"] for line in read_history(stopped / "history.jsonl")] == [FLOAT32, BFLOAT16, BFLOAT16]


def without_lines(file, kept):
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if kept(json.loads(line)["step"])))


def without_tests(file):
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "test/" not in line))


def torn(file):
    """Ends the file inside of the line of step 6 that has the metrics of training."""
    before, line, _ = file.read_text().partition('{"step": 6, ')
    file.write_text(f"{before}{line}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "lines", "gap"),
    [
        (lambda file: without_lines(file, lambda step: step <= 2), 5, "3 to 6"),
        (lambda file: without_lines(file, lambda step: step <= 4), 2, "5 to 6"),
        (lambda file: file.write_text(""), 6, "1 to 6"),
        (lambda file: file.unlink(), 6, "1 to 6"),
        (torn, 2, "5 to 6"),
        (lambda file: without_lines(file, lambda step: step > 2), 1, "1 to 6"),
        (without_tests, 2, "1 to 6"),
    ],
    ids=["two", "one", "empty", "deleted", "torn", "head", "tests"],
)
def test_lost_metrics_are_told_when_the_run_goes_on_and_stay_told(folder, damage, lines, gap, capsys):
    damage(folder / "metrics.jsonl")
    says = rf"metrics\.jsonl lacks {lines} of the 6 lines .*, of steps {gap}: summary and plots are of the other lines"
    with pytest.warns(CheckpointWarning, match=says):
        resume(folder, "--steps", "7")
    summary = resume(folder, "--steps", "8")
    assert summary["metrics_missing"] == [gap]
    assert f"lines of steps {gap} are lost" in capsys.readouterr().out


def test_the_records_of_another_process_are_not_written(tmp_path):
    records = Records(writing=False, waiting=False)
    records.put(tmp_path / "config.toml", b"x")
    records.written_after(lambda *_: (0, 0))(0, 0, 1)
    assert list(tmp_path.iterdir()) == []
