"""Runs with parts of the user's own: in both modes, with an overflow, resumed, on a mesh, in a plan; and bad parts."""

import dataclasses
import json
import pathlib
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax import Diverged, UsageError, cli
from mpjax.commands import diagnose_run, evaluate_run, fields_of, planned_step, run, with_parts
from mpjax.config import Config, Data, Diagnose, Evaluation, load_config
from mpjax.errors import CallbackError, LoggerWarning
from mpjax.loop import complete_checkpoints, read_checkpoint
from mpjax.report import read_metrics
from mpjax.training import make_mesh


PARTS = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "parts"

ALL = shlex.split(f"""
--data.name {PARTS}/data.py:stripes --data.num_classes 2 --data.augment {PARTS}/augmentation.py:light
--model.name {PARTS}/objective.py:Pair --training.objective {PARTS}/objective.py:distillation
--training.metrics {PARTS}/metrics.py:top2 {PARTS}/metrics.py:precision_of_0
--loop.callbacks {PARTS}/callbacks.py:Norms --report.writers {PARTS}/writer.py:csv_file
--data.crop_padding 0 --data.batch_size 16 --data.eval_batch_size 48 --steps 12
--optimizer.learning_rate 0.1 --optimizer.warmup 0
--loop.log_every 4 --loop.eval_every 6 --loop.save_every 6 --report.no_tensorboard --report.no_plot
--precision.initial_scale 524288
""")


def train(folder, *flags):
    return run(load_config([*ALL, "--output_dir", str(folder), *flags]))


def arrays(folder, step):
    return read_checkpoint(folder / "checkpoints", str(step))[1]


@pytest.fixture(scope="module", params=["module", pytest.param("autocast", marks=pytest.mark.slow)])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / request.param
    return folder, train(folder, "--precision.mode", request.param)


def test_all_parts_work_together_in_float16_with_an_overflow(whole):
    folder, summary = whole
    assert summary["skipped"] >= 1
    assert summary["steps"] + summary["skipped"] == 12
    assert summary["test/teacher"] > 0.8
    assert {"test/student", "test/top2", "test/precision_of_0", "test/loss"} <= summary.keys()
    assert summary["test/top2"] == 1.0  # of two classes
    assert summary["best/test/loss"] == min(
        r["test/loss"] for r in read_metrics(folder / "metrics.jsonl") if "test/loss" in r
    )
    assert [line.split()[0] for line in (folder / "norms.txt").read_text().splitlines()] == ["6", "12"]
    assert "12,test/student," in (folder / "metrics.csv").read_text()


def test_the_test_set_is_measured_example_by_example(whole):
    """64 examples in batches of 48: the padding of the second counts for nothing."""
    folder, summary = whole
    metrics = evaluate_run(Evaluation(run=str(folder), trust_code=True))
    for name in ("test/loss", "test/student", "test/precision_of_0"):
        assert metrics[name] == pytest.approx(summary[name], rel=1e-6)
    assert metrics["test/student"] * 64 == pytest.approx(round(metrics["test/student"] * 64))


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_with_its_parts(whole, tmp_path):
    folder, _ = whole
    mode = folder.name
    train(tmp_path / "half", "--precision.mode", mode, "--steps", "6", "--optimizer.schedule", "constant")
    train(tmp_path / "all", "--precision.mode", mode, "--optimizer.schedule", "constant")
    run(load_config(shlex.split(f"--resume --output_dir {tmp_path}/half --steps 12 --trust_code")))
    one, two = arrays(tmp_path / "half", 12), arrays(tmp_path / "all", 12)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name


def test_the_code_of_a_stored_run_needs_trust(whole):
    folder, _ = whole
    with pytest.raises(
        UsageError, match=r"names code .*data.augment .*training.objective .*loop.callbacks .*report.writers"
    ):
        evaluate_run(Evaluation(run=str(folder)))


@pytest.mark.slow
def test_a_step_is_diagnosed_with_its_objective(whole):
    folder, _ = whole
    found = diagnose_run(Diagnose(run=str(folder), step=8, trust_code=True, search="none"))
    assert found.verdict == "healthy"


@pytest.mark.slow
def test_the_plan_has_the_own_step(capsys):
    config = load_config(ALL)
    fields = fields_of(config, vocabulary=0)
    step = planned_step(config, fields)
    assert step.batch["image"].shape == (16, 8, 8, 1)
    train_step, abstract = step.on(make_mesh())
    _, metrics = jax.eval_shape(train_step, *abstract)
    assert {"loss", "teacher", "student", "grad_norm"} <= set(metrics)


def mean_of_pixels(model, batch, key):
    return {"loss": jnp.square(model(batch["image"]) - batch["x"]).mean(-1)}


class Pixels(nnx.Module):
    def __init__(self, fields, *, rngs):
        self.layer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, images):
        return self.layer(images.reshape(len(images), -1))


ROWS = [{"image": np.full((2, 2, 1), n / 8, np.float32), "x": np.float32([n / 4])} for n in range(8)]
BRIEF = shlex.split("""
--task own --data.batch_size 4 --data.eval_batch_size 8 --data.crop_padding 0 --steps 4 --optimizer.warmup 0
--report.no_tensorboard --report.no_plot --loop.log_every 2 --loop.eval_every 2 --loop.save_every 2
""")


def in_python(folder, *flags, **parts):
    given = {"model": Pixels, "source": (ROWS, ROWS), "objective": mean_of_pixels} | parts
    return run(brief(folder, *flags), **given)


def brief(folder, *flags):
    return load_config([*BRIEF, "--output_dir", str(folder), *flags])


@pytest.mark.slow
def test_parts_may_be_values_of_python(tmp_path):
    seen = []

    class Heard:
        def evaluated(self, step, metrics, model):
            seen.append((step, model()(jnp.zeros((1, 2, 2, 1))).shape))

        def ended(self, summary):
            seen.append(summary["steps"])

    summary = run(
        brief(tmp_path / "run"),
        model=Pixels,
        source=(ROWS, ROWS),
        objective=mean_of_pixels,
        callbacks=[Heard()],
    )
    assert seen == [(2, (1, 1)), (4, (1, 1)), 4]
    assert summary["parameters"] == 5
    text = (tmp_path / "run" / "config.toml").read_text()
    assert 'objective = "python:mean_of_pixels"' in text
    with pytest.raises(UsageError, match="was given parts in Python, .*training.objective python:mean_of_pixels"):
        evaluate_run(Evaluation(run=str(tmp_path / "run"), trust_code=True))


def with_outputs(model, batch):
    outputs = model(batch["image"])
    return {"loss": jnp.square(outputs - batch["x"]).mean(-1), "outputs": outputs}


def above(outputs, batch):
    return outputs[:, 0] > batch["x"][:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["--mesh.data", "--mesh.fsdp"])
def test_parts_on_a_mesh_do_what_they_do_on_one_device(tmp_path, axis):
    """With an augmentation without random numbers, which differ from device to device."""
    parts = {
        "objective": with_outputs,
        "augment": lambda batch, key: {**batch, "image": batch["image"] * 0.5},
        "metrics": [above],
        "optimizer": optax.adam,
        "schedule": lambda peak: optax.constant_schedule(peak / 10),
    }
    heard, flags = [], ("--precision.policy", "float32", "--optimizer.weight_decay", "0")

    class Hearing:
        def evaluated(self, step, metrics, model):
            heard.append((step, model()(jnp.zeros((2, 2, 2, 1))).shape))

    one = in_python(tmp_path / "one", *flags, **parts)
    two = in_python(tmp_path / "two", *flags, axis, "2", **parts, callbacks=[Hearing()])
    assert heard == [(2, (2, 1)), (4, (2, 1))]
    for name in ("train/loss", "test/loss", "test/above"):
        assert two[name] == pytest.approx(one[name], rel=1e-5), name
    before, after = arrays(tmp_path / "one", 4), arrays(tmp_path / "two", 4)
    assert before.keys() == after.keys()
    for name in before:
        if name.startswith("params"):
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_that_is_good_enough_is_stopped_by_the_example(tmp_path, capsys):
    def sure(model, batch):
        return mean_of_pixels(model, batch, None) | {"accuracy": jnp.full(len(batch["x"]), 0.95)}

    callback = f"{PARTS}/callbacks.py:GoodEnough"
    summary = in_python(tmp_path / "run", "--steps", "40", "--loop.callbacks", callback, objective=sure)
    assert summary["attempts"] == 2  # the first evaluation
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [2]
    assert "stopped at step 2 of 40, as a callback asked" in capsys.readouterr().out


def test_a_model_is_kept_by_calling_in_time(tmp_path):
    """What `model()` returned stays; `model` itself is of no use after the next step, and says so."""

    class Keeping:
        models, calls = [], []

        def evaluated(self, step, metrics, model):
            for earlier in self.calls:
                earlier()
            self.models.append(model())
            for earlier in self.models:
                earlier(jnp.zeros((1, 2, 2, 1)))
            if step == 4:
                self.calls.append(model)

    with pytest.raises(CallbackError, match=r"Keeping.evaluated at step 6: .*call model\(\) in `evaluated` and keep"):
        in_python(tmp_path / "run", "--steps", "8", callbacks=[Keeping()])


def test_a_run_with_parts_in_python_resumes(tmp_path):
    in_python(tmp_path / "run", "--steps", "2")
    config = with_parts(brief(tmp_path / "run"), model=Pixels, source=(ROWS, ROWS), objective=mean_of_pixels)
    summary = run(dataclasses.replace(config, resume=True))
    assert summary["attempts"] == 4


def test_early_stopping_ends_a_run_that_no_longer_improves(tmp_path, capsys):
    flags = "--optimizer.learning_rate 0 --steps 40 --loop.stop_after 2"
    summary = in_python(tmp_path / "run", *shlex.split(flags))
    assert summary["attempts"] == 6  # evaluated at 2, 4 and 6: two times no better
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1] == 6
    said = "stopped at step 6 of 40: test/loss did not improve in 2 evaluations in a row (--loop.stop_after 2)"
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["attempts"] == 6


def test_a_failed_callback_is_named_and_the_run_can_go_on(tmp_path):
    class Broken:
        def evaluated(self, step, metrics, model):
            raise KeyError("table")

    with pytest.raises(
        CallbackError, match=r"callback Broken.evaluated at step 2: KeyError: 'table' .*step 2 is saved"
    ):
        in_python(tmp_path / "run", callbacks=[Broken()])
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [2]


@pytest.mark.slow
def test_a_failed_callback_is_a_line_and_an_exit_code(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("class Broken:\n    def logged(self, step, metrics):\n        return metrics['train/los']\n")
    folder, data = tmp_path / "run", f"--data.name {PARTS}/data.py:stripes --data.num_classes 2 --model.name mlp"
    flags = f"{data} --loop.callbacks {file}:Broken --output_dir {folder} --steps 4 --loop.log_every 2"
    assert cli.train([*shlex.split(flags), "--report.no_plot", "--report.no_tensorboard"]) == 1
    said = "error: callback Broken.logged at step 2: KeyError: 'train/los' (mine.py, line 3); the checkpoint of step 3"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
def test_a_callback_that_exits_leaves_a_checkpoint_and_an_exit_code(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import sys\n\nclass Done:\n    def evaluated(self, step, metrics, model):\n        sys.exit(0)\n")
    folder, data = tmp_path / "run", f"--data.name {PARTS}/data.py:stripes --data.num_classes 2 --model.name mlp"
    flags = f"{data} --loop.callbacks {file}:Done --output_dir {folder} --steps 4 --loop.eval_every 2"
    assert cli.train([*shlex.split(flags), "--report.no_plot", "--report.no_tensorboard"]) == 1
    said = "error: callback Done.evaluated at step 2: it called sys.exit(0) (mine.py, line 5); to end a run, return"
    assert capsys.readouterr().err.startswith(said)
    assert list(complete_checkpoints(folder / "checkpoints")) == [2]


class Quiet:
    """A writer that fails where it is told to."""

    def __init__(self, at=None, error=None):
        self.at, self.error, self.heard = at, error, []

    def _hear(self, name):
        self.heard.append(name)
        if name == self.at:
            raise self.error

    def write(self, step, metrics):
        self._hear("write" if "train/loss" in metrics else "write test")

    def layers(self, step, layers):
        self._hear("layers")

    def saved(self, step):
        self._hear("saved")

    def message(self, text):
        self._hear("message")

    def close(self):
        self._hear("close")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "error", "said", "step"),
    [
        ("write", KeyError("table"), r"writer Quiet.write at step 2: KeyError: 'table' \(test_own_parts.py, line", 2),
        ("write test", SystemExit(0), r"writer Quiet.write at step 2: it called sys.exit\(0\)", 2),
        ("layers", ValueError("odd"), "writer Quiet.layers at step 2: ValueError: odd", 2),
        ("saved", OSError(28, "full"), r"writer Quiet.saved at step 2: OSError: \[Errno 28\] full", 2),
    ],
)
def test_a_failed_writer_is_named_and_leaves_a_checkpoint(tmp_path, at, error, said, step):
    writer, other = Quiet(at, error), Quiet()
    with pytest.raises(CallbackError, match=f"{said}.*; the checkpoint of step {step} is saved"):
        in_python(tmp_path / "run", "--diagnosis.every", "2", writers=[writer, other])
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [step]
    assert writer.heard[-2:] == [at, "close"]  # nothing more but that
    assert "write" in other.heard


@pytest.mark.slow
def test_a_writer_that_cannot_be_closed_is_an_error_after_a_complete_run(tmp_path, capsys):
    ended = []

    class Hearing:
        def ended(self, summary):
            ended.append(summary["steps"])

    with pytest.raises(CallbackError, match=r"^writer Quiet.close: ValueError: odd \(test_own_parts.py, line \d+\)$"):
        in_python(tmp_path / "run", writers=[Quiet("close", ValueError("odd"))], callbacks=[Hearing()])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4
    assert "test loss" in capsys.readouterr().out
    assert ended == [4]


def test_a_writer_that_fails_at_the_first_message_leaves_no_folder(tmp_path):
    with pytest.raises(CallbackError, match="writer Quiet.message: ValueError: odd"):
        in_python(tmp_path / "run", writers=[Quiet("message", ValueError("odd"))])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_failed_writer_does_not_hide_why_a_run_failed(tmp_path):
    def infinite(model, batch):
        return {"loss": mean_of_pixels(model, batch, None)["loss"] * jnp.inf}

    flags = ("--precision.policy", "float32", "--diagnosis.no_search")
    with pytest.raises(Diverged), pytest.warns(LoggerWarning, match="writer Quiet.close: ValueError: odd"):
        in_python(tmp_path / "run", *flags, objective=infinite, writers=[Quiet("close", ValueError("odd"))])


@pytest.mark.parametrize(
    ("writer", "said"),
    [
        (object(), "writers has object, which has no write, layers, saved, message, close; wanted an object with"),
        ("wandb", "writers has the text 'wandb'; wanted .*; names of loggers are for --report.writers"),
        (Quiet, r"writers has the class Quiet; wanted .*: write Quiet\(...\)"),
        (
            type("Short", (Quiet,), {"write": lambda self, step: None})(),
            r"whose write takes \(step\): it is",
        ),
    ],
)
def test_what_is_no_writer_is_an_error_before_anything_takes_time(tmp_path, writer, said):
    with pytest.raises(UsageError, match=said):
        run(Config(output_dir=str(tmp_path / "run")), writers=[writer])
    assert not (tmp_path / "run").exists()


def test_callbacks_hear_of_a_divergence(tmp_path):
    heard = []

    class Hearing:
        def diverged(self, step, reason):
            heard.append((step, reason))

    def infinite(model, batch):
        return {"loss": mean_of_pixels(model, batch, None)["loss"] * jnp.inf}

    with pytest.raises(Diverged):
        in_python(
            tmp_path / "run",
            "--precision.policy",
            "float32",
            "--diagnosis.no_search",
            objective=infinite,
            callbacks=[Hearing()],
        )
    assert heard[0][0] == 1


@pytest.mark.parametrize(
    ("flags", "parts", "said"),
    [
        ([], {"objective": None}, "--task own: wanted --training.objective"),
        (
            [],
            {"objective": lambda model, batch: {"loss": jnp.mean(batch["x"])}},
            r"loss has shape \(\) for a batch of 2",
        ),
        (["--loop.best", "acc", "--loop.best_is", "max"], {}, "--loop.best acc: the test set has the metrics loss"),
        (["--loop.best", "acc"], {}, "--loop.best acc: the test set has the metrics loss"),
        ([], {"metrics": [lambda outputs, batch: batch["x"][:, 0]]}, "returns no `outputs` to compute them from"),
        ([], {"callbacks": [object()]}, "callback object has none of the methods"),
        ([], {"source": 3}, "returned a int; wanted"),
        (["--report.writers", "builtins:print"], {}, "--report.writers builtins:print returned NoneType"),
        (["--report.writers", "builtins:int"], {}, "--report.writers builtins:int failed: TypeError: int"),
        ([], {"objective": 3}, "objective of mpjax.run is not callable: it is a int; wanted a function or a class"),
        ([], {"metrics": [3]}, "metrics of mpjax.run is not callable: it is a int"),
        ([], {"optimizer": optax.sgd(0.1)}, "it is an optax transformation; .* `lambda learning_rate: optax.adam"),
        ([], {"objective": lambda model, batch: batch["y"]}, r"failed: KeyError: 'y' \(test_own_parts.py, line"),
    ],
)
def test_bad_parts_are_errors_before_the_first_step_and_leave_no_folder(tmp_path, flags, parts, said):
    with pytest.raises(UsageError, match=said):
        in_python(tmp_path / "run", *flags, **parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_whose_writer_is_wrong_keeps_its_settings_and_results(tmp_path):
    folder = tmp_path / "run"
    in_python(folder, "--steps", "2")
    before = {name: (folder / name).read_bytes() for name in ("config.toml", "metrics.jsonl", "summary.json")}
    config = with_parts(brief(folder), model=Pixels, source=(ROWS, ROWS), objective=mean_of_pixels)
    report = dataclasses.replace(config.report, writers=("builtins:print",))
    with pytest.raises(UsageError, match="builtins:print returned NoneType"):
        run(dataclasses.replace(config, resume=True, report=report))
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert list(complete_checkpoints(folder / "checkpoints")) == [2]


def test_settings_without_parts_are_unchanged():
    assert with_parts(Config(), model=None, metrics=None) == Config()


def test_one_part_in_place_of_a_list_is_an_error():
    with pytest.raises(UsageError, match=r"metrics is <function .*>: wanted a list of them, \[...\], also of one"):
        run(Config(), metrics=lambda logits, batch: logits)  # pyright: ignore
    with pytest.raises(UsageError, match="writers is 3: wanted a list"):
        run(Config(), writers=3)  # pyright: ignore
    with pytest.raises(UsageError, match="--data.flip is 'no'"):
        run(Config(data=Data(flip="no")))  # pyright: ignore


@pytest.mark.slow
def test_by_default_the_task_own_leaves_images_with_their_columns(tmp_path, capsys):
    """A target for each pixel: half of the images shifted by a pixel would be an error of about 0.3."""
    images = np.random.default_rng(0).integers(1, 256, (8, 4, 4, 1), np.uint8)
    arrays = {"image": images, "depth": (images[..., 0] / 255).astype(np.float32)}

    def difference(model, batch):
        apart = jnp.abs(batch["image"][..., 0] - batch["depth"]).mean((1, 2))
        return {"loss": jnp.square(model(batch["image"][:, :2, :2])).mean(-1), "apart": apart}

    at = BRIEF.index("--data.crop_padding")
    flags = [*BRIEF[:at], *BRIEF[at + 2 :], "--output_dir", str(tmp_path / "run")]
    parts = {"model": Pixels, "source": (arrays, arrays), "objective": difference}
    run(load_config(flags), **parts)
    assert max(r.get("train/apart", 0) for r in read_metrics(tmp_path / "run" / "metrics.jsonl")) < 1e-6
    with pytest.raises(UsageError, match=r"--data.crop_padding 1: the image moves, and depth \[4, 4\] would not"):
        run(load_config([*flags[:-1], str(tmp_path / "other"), "--data.crop_padding", "1"]), **parts)
    assert not (tmp_path / "other").exists()


def test_settings_of_another_type_are_an_error():
    with pytest.raises(UsageError, match="mpjax.run wants an mpjax.Config as its first argument, got a str"):
        run("run.toml")  # pyright: ignore
