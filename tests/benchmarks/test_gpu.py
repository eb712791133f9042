"""The GPU benchmark without a GPU: its order, its checks, its arithmetic, and all of it once at tiny sizes."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from gpu.cases import CASES, SMALL, Row, rows_of
from gpu.check import disagreement
from gpu.conclusions import conclusions
from gpu.results import Results
from gpu.schedule import Budget, Schedule
from gpu.spread import ratios, spread
from gpu.table import table
from gpu.worker import Failed, Settings, Worker, timed


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

BFLOAT16 = Row(peer="mpjax", policy="mixed_bfloat16")
FLOAT16 = Row(peer="mpjax", policy="mixed_float16")
UNSCALED = Row(peer="mpjax", policy="mixed_float16", scaling="none")
FLOAT32 = Row(peer="mpjax", policy="float32")
TORCH = Row(peer="torch", policy="mixed_bfloat16")
RESNET50, GPT2, VIT_B16, RESNET18, UNET = CASES
CEILINGS = {"bandwidth": 1e12, "matmul": dict.fromkeys(("float32", "mixed_bfloat16", "mixed_float16"), 1e14)}

# --- Whether a step is right ------------------------------------------------------------------------------------------

REFERENCE = {"loss": 2.0, "grad_norm": 1.0, "second_loss": 1.5}


@pytest.mark.parametrize(
    ("name", "value", "row", "right"),
    [
        ("loss", 2.03, BFLOAT16, True),  # 4 roundings of 2^-8 in 2 are 0.031
        ("loss", 2.04, BFLOAT16, False),
        ("loss", 2.03, FLOAT16, False),  # and of 2^-11, 0.0039
        ("grad_norm", 1.06, BFLOAT16, True),
        ("grad_norm", 1.07, BFLOAT16, False),
        ("grad_norm", 1.01, FLOAT32, True),  # TF32
        ("grad_norm", 1.02, FLOAT32, False),
        ("second_loss", 1.7, BFLOAT16, True),
        ("second_loss", 2.0, BFLOAT16, False),  # no update
        ("second_loss", 1.0, BFLOAT16, False),  # twice
        ("loss", float("nan"), BFLOAT16, False),
        ("second_loss", float("nan"), BFLOAT16, False),
    ],
)
def test_a_step_is_right_that_is_off_by_no_more_than_its_policy_rounds(name, value, row, right):
    found = {**REFERENCE, name: value}
    said = disagreement(found, REFERENCE, row)
    assert said is None if right else (name.replace("second_loss", "decrease") in said)


def test_a_gradient_that_lost_what_scaling_would_have_kept_is_no_fault_of_a_step_without_it():
    found = {**REFERENCE, "grad_norm": 0.8, "second_loss": 1.8}
    assert disagreement(found, REFERENCE, UNSCALED) is None
    assert "grad_norm 0.8, in float32 1" in disagreement(found, REFERENCE, FLOAT16)


def test_what_a_loop_does_not_compute_is_not_compared():
    assert disagreement({"loss": 2.0, "second_loss": 1.5}, REFERENCE, FLOAT16) is None


# --- What follows from times ------------------------------------------------------------------------------------------


def test_repeats_become_a_median_and_quartiles():
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "repeats": 5}
    assert spread([7.0]) == {"median": 7.0, "quartiles": [7.0, 7.0], "repeats": 1}


def test_a_ratio_is_of_medians_and_its_quartiles_of_repeats_next_to_each_other():
    assert ratios([2.0, 4.0, 6.0], [1.0, 1.0, 3.0]) == {"median": 4.0, "quartiles": [2.0, 3.0], "repeats": 3}


def concluded(**seconds):
    """The conclusions of a ResNet-50 of rows with these times, on a device of 1 TB/s and 100 TFLOP/s."""
    rows = {BFLOAT16: "own", FLOAT32: "full", TORCH: "torch", FLOAT16: "scaled", UNSCALED: "unscaled"}
    facts = {"traffic_bytes": 2e10, "device_peak_bytes": 12e9}
    record = {
        "title": str(RESNET50),
        "unit": "images",
        "flops": 1e12,
        "rows": {
            str(row): {"policy": row.policy, "seconds": seconds[key], "facts": facts}
            for row, key in rows.items()
            if key in seconds
        },
    }
    return conclusions(RESNET50, record, CEILINGS)


def test_items_and_the_share_of_the_roofline_follow_from_the_time_of_a_step():
    row = concluded(own=[0.04, 0.05, 0.05])["rows"]["mpjax mixed_bfloat16"]
    assert row["items_per_second"]["median"] == 256 / 0.05
    # 20 GB at 1 TB/s take 0.02 s, 1 TFLOP at 100 TFLOP/s takes 0.01 s: traffic bounds, at 0.02 of 0.05 s.
    assert (row["roofline"]["compute_seconds"], row["roofline"]["traffic_seconds"]) == (0.01, 0.02)
    assert (row["roofline"]["bound"], row["roofline"]["share"]) == ("traffic", pytest.approx(0.4))


def test_ratios_are_of_speeds_and_the_cost_of_scaling_of_times():
    found = concluded(own=[0.05], full=[0.1], torch=[0.06], scaled=[0.0505], unscaled=[0.05])["ratios"]
    assert {name: round(ratio["median"], 3) for name, ratio in found.items()} == {
        "mixed_bfloat16 to PyTorch": 1.2,
        "mixed_bfloat16 to float32": 2.0,
        "mixed_float16 to float32": 1.98,
        "without to with loss scaling": 1.01,
    }


def test_a_row_with_an_error_has_no_speed_and_no_ratio():
    case = concluded(own=[0.05], torch=[0.06])
    case["rows"]["torch mixed_bfloat16"] = {"policy": "mixed_bfloat16", "seconds": [0.06], "error": "wrong"}
    again = conclusions(RESNET50, case, {})
    assert "items_per_second" not in again["rows"]["torch mixed_bfloat16"]
    assert again["ratios"] == {}


def test_the_table_has_a_line_for_each_policy_and_names_what_has_no_number():
    case = concluded(own=[0.05], full=[0.1], torch=[0.0625], scaled=[0.0505], unscaled=[0.05])
    for policy in ("mixed_float16", "mixed_bfloat16"):
        case["rows"][f"linen {policy}"] = {"policy": policy, "error": "out of memory"}
    header = {
        "device": "NVIDIA H100",
        "driver": "580.1",
        "python": "3.12.3",
        "date": "2026-11-21",
        "versions": {"jax": "0.11.2"},
        "torch": {"torch": "2.11.0"},
        "ceilings": {"bandwidth": 3.0e12, "matmul": {"float32": 4e14, "mixed_bfloat16": 7.98e14}},
    }
    lines = table({**header, "cases": {"resnet50": case}}).splitlines()
    assert lines[0].startswith(
        "NVIDIA H100, driver 580.1, Python 3.12.3, jax 0.11.2, torch 2.11.0, 2026-11-21. It reads and writes 3 TB/s "
        "and multiplies matrices at 400 TFLOP/s in float32, 798 TFLOP/s in mixed_bfloat16."
    )
    name = "ResNet-50, 224x224, batch 256"
    own, torch = "5,120 images/s (5,120 to 5,120)", "4,096 images/s (4,096 to 4,096)"
    assert lines[4:7] == [
        f"| {name} | `float32` | 2,560 images/s (2,560 to 2,560) | 12.0 GB | 20% (traffic) | - | - | - | - | - |",
        f"| {name} | `mixed_bfloat16` | {own} | 12.0 GB | 40% (traffic) | 2.00 (2.00 to 2.00) | {torch} "
        "| 1.25 (1.25 to 1.25) | - | - |",
        f"| {name} | `mixed_float16` | 5,069 images/s (5,069 to 5,069) | 12.0 GB | 40% (traffic) | 1.98 (1.98 to 1.98) "
        "| - | - | - | +1.0% (+1.0% to +1.0%) |",
    ]
    assert lines[-1] == f"- {name}, linen mixed_float16, linen mixed_bfloat16: out of memory"


# --- The order of the work --------------------------------------------------------------------------------------------

GOOD = {"loss": 2.0, "grad_norm": 1.0, "second_loss": 1.5}


class Stub:
    """A worker that answers at once; what it is asked is written down, and takes time on a clock that it moves."""

    def __init__(self, world, peer):
        self.world, self.peer = world, peer

    def ask(self, command, *arguments, seconds):
        row = next((argument for argument in arguments if isinstance(argument, Row)), None)
        self.world.asked.append((self.peer, command, row and str(row)))
        takes = self.world.takes.get(command, 0.0)
        self.world.now += min(takes, seconds)
        if takes > seconds:
            raise Failed(f"no answer within {seconds:.0f} s")
        answer = self.world.answers.get((command, row and str(row)), self.world.answers.get((self.peer, command)))
        if isinstance(answer, Exception):
            raise answer
        return answer or {
            "describe": {"device": "stub", "platform": "gpu"},
            "ceilings": CEILINGS,
            "reference": {**GOOD, "flops": 10**12},
            "prepare": {"facts": {"traffic_bytes": 10**9}, "first": GOOD},
            "measure": 0.05,
            "drop": None,
        }.get(command)

    def close(self):
        self.world.asked.append((self.peer, "close", None))


class World:
    """A clock and what all workers were asked."""

    def __init__(self, answers=(), **takes):
        self.now, self.asked, self.answers, self.takes = 0.0, [], dict(answers), takes

    def run(self, cases=(RESNET50,), *, path=None, minutes=10.0, rounds=3):
        self.results = Results(path)
        budget = Budget(60 * minutes, clock=lambda: self.now)
        settings = Settings(small=False, cache="")

        def start(peer, settings, share):
            return Stub(self, peer)

        Schedule(self.results, budget, settings, start=start, rounds=rounds, seconds=0.3).run(cases)
        return self.results.concluded()["cases"]

    def rows(self, command):
        return [row for _, asked, row in self.asked if asked == command]


def test_the_important_rows_come_first_and_all_take_turns():
    world = World()
    found = world.run()["resnet50"]["rows"]
    wanted = [str(row) for row in rows_of(RESNET50)]
    assert wanted[:3] == ["mpjax mixed_bfloat16", "torch mixed_bfloat16", "mpjax float32"]
    assert world.rows("prepare") == wanted
    assert world.rows("measure") == [*wanted, *wanted, *wanted, *wanted]  # each by itself, then three rounds
    assert all(row["seconds"] == [0.05, 0.05, 0.05] for row in found.values())


def test_references_are_gone_before_any_row_takes_memory():
    world = World()
    world.run()
    order = [command for peer, command, _ in world.asked if peer == "mpjax"]
    assert order.index("close", order.index("reference")) < order.index("prepare")


def test_a_row_that_fails_is_recorded_and_the_others_go_on():
    out_of_memory = Failed("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory")
    found = World({("prepare", "mpjax float32"): out_of_memory}).run()["resnet50"]["rows"]
    assert found["mpjax float32"]["error"] == "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert [name for name, row in found.items() if "items_per_second" not in row] == ["mpjax float32"]


def test_a_row_that_computes_something_else_has_no_speed():
    wrong = {"facts": {}, "first": {**GOOD, "second_loss": 2.0}}
    world = World({("prepare", "torch mixed_float16"): wrong})
    row = world.run()["resnet50"]["rows"]["torch mixed_float16"]
    assert row["error"].startswith("wrong: decrease 0, in float32 0.5")
    assert "items_per_second" not in row
    assert "torch mixed_float16" not in world.rows("measure")


def test_without_a_reference_nothing_of_a_peer_is_timed():
    found = World({("linen", "reference"): Failed("no answer within 9 s")}).run()["resnet50"]["rows"]
    assert found["linen mixed_float16"]["error"] == "nothing to check it against: no answer within 9 s"
    assert "items_per_second" in found["mpjax mixed_float16"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Failed("ModuleNotFoundError: No module named 'torch'"), "ModuleNotFoundError: No module named 'torch'"),
        ({"device": "cpu"}, "PyTorch sees no GPU"),
    ],
)
def test_a_peer_that_is_not_there_is_named_and_never_started_again(answer, said):
    world = World({("torch", "describe"): answer})
    rows = world.run()["resnet50"]["rows"]
    assert {row["error"] for name, row in rows.items() if name.startswith("torch")} == {said}
    assert [command for peer, command, _ in world.asked if peer == "torch"] == ["describe", "close"]


def test_when_the_time_is_over_the_rest_is_listed_and_what_was_compiled_is_timed():
    world = World(prepare=40.0)
    cases = world.run((RESNET50, RESNET18), minutes=5.0)
    assert world.now <= 300.0
    # 214 s of the 300 are the first case's, of which its rounds need 12.
    begun = {name: [len(row.get("seconds", [])) for row in case["rows"].values()] for name, case in cases.items()}
    assert begun == {"resnet50": [3] * 6 + [0] * 3, "resnet18": [3] + [0] * 7}
    errors = {row["error"] for case in cases.values() for row in case["rows"].values() if "error" in row}
    assert errors == {"left out: the time was over", "no answer within 15 s"}


def test_a_worker_that_dies_in_the_rounds_leaves_what_was_measured():
    world = World()
    died = Failed("the process ended with code -11")
    calls = iter([0.05, 0.07])

    class Dies(dict):
        def get(self, key, default=None):
            return next(calls, died) if key == ("measure", "torch float32") else default

    world.answers = Dies()
    row = world.run()["resnet50"]["rows"]["torch float32"]
    assert (row["alone"], row["seconds"], row["stopped"]) == (0.05, [0.07], "the process ended with code -11")
    assert row["items_per_second"]["median"] == 256 / 0.07


def test_the_file_is_complete_after_every_row(tmp_path):
    path = tmp_path / "gpu.json"

    class Cut(Exception):
        """The machine is taken away."""

    world = World({("prepare", "torch mixed_bfloat16"): Cut()})
    with pytest.raises(Cut):
        world.run(path=path)
    seen = json.loads(path.read_text())
    assert seen["finished"] is False
    assert seen["device"] == "stub"
    assert seen["cases"]["resnet50"]["rows"]["mpjax mixed_bfloat16"]["items_per_second"]["median"] == 256 / 0.05
    world.answers.clear()
    world.run(path=path)
    assert json.loads(path.read_text())["finished"] is True


def test_every_step_counts_and_the_last_is_waited_for():
    done = []

    class Stepper:
        def run(self):
            done.append("run")

        def wait(self):
            done.append("wait")

    clock = iter([10.0, 11.5]).__next__
    assert timed(Stepper(), 3, clock) == 0.5
    assert done == ["run", "run", "run", "wait"]


def test_a_worker_tells_what_failed_and_that_it_died(tmp_path):
    worker = Worker("torch", Settings(small=True, cache=str(tmp_path)), 0.0)
    try:
        with pytest.raises(Failed, match="^AttributeError: 'Answers' object has no attribute 'dance'$"):
            worker.ask("dance", seconds=60)
        worker.process.kill()
        with pytest.raises(Failed, match=r"^the process ended with code (-9|None)$"):
            worker.ask("describe", seconds=60)
    finally:
        worker.close()


def test_a_worker_that_does_not_answer_in_time_is_ended(tmp_path):
    worker = Worker("torch", Settings(small=True, cache=str(tmp_path)), 0.0)
    with pytest.raises(Failed, match="^no answer within 0 s$"):
        worker.ask("describe", seconds=0.0)
    assert worker.process.exitcode is not None


def test_the_transformers_are_the_published_ones_and_get_more_time_than_what_comes_after():
    assert (str(GPT2), GPT2.items, GPT2.weight) == ("GPT-2 small, 1024 tokens, batch 32", 32768, 1.5)
    assert (str(VIT_B16), VIT_B16.items, VIT_B16.weight) == ("ViT-B/16, 224x224, batch 256", 256, 1.5)
    assert [case.weight for case in CASES] == [2.5, 1.5, 1.5, 1.0, 0.5]


# --- The same work for everyone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.extra
def test_pytorch_trains_as_many_parameters(case):
    torch = pytest.importorskip("torch")
    from flax import nnx
    from gpu import torch_models, with_mpjax

    with torch.device("meta"):
        theirs = sum(p.numel() for p in torch_models.network(case)[0].parameters())
    state = nnx.state(nnx.eval_shape(lambda: with_mpjax.network(case, nnx.Rngs(0))), nnx.Param)
    assert sum(p.size for p in jax.tree.leaves(state)) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("case", [RESNET50, GPT2, VIT_B16, UNET], ids=lambda case: case.name)
def test_every_step_at_full_width_is_traced_and_lowered_for_a_gpu(case):
    from gpu import with_linen, with_mpjax

    from mpjax.precision.casting import flops_of

    if case.name != "unet":  # whose depth decides its widths; in the others a stage repeats one block
        case = dataclasses.replace(case, stages=(2,) * len(case.stages))
    work = {}
    for row in rows_of(case):
        if row.peer == "torch":
            continue
        module = {"mpjax": with_mpjax, "linen": with_linen}[row.peer]
        written = module.written(case, row)
        traced = written.step.trace(*written.abstract())
        assert "module" in traced.lower(lowering_platforms=("cuda",)).as_text()
        work[str(row)] = sum(flops_of(traced.jaxpr).values())
    assert len(set(work.values())) == 1, work


BLOCKED = (
    "tensorflow_datasets",
    "tensorflow",
    "grain",
    "orbax",
    "tensorboardX",
    "safetensors",
    "tyro",
    "tomli_w",
    "matplotlib",
    "sklearn",
    "PIL",
    "array_record",
    "importlib_resources",
    "datasets",
    "tokenizers",
    "transformers",
    "timm",
)
"""What a machine with jax, flax, optax and jmp need not have."""

BLOCK = f"""
import importlib.abc, importlib.machinery, sys

class Blocked(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):  # only now: PyTorch looks for some of them without importing them
        raise ModuleNotFoundError(f"blocked: {{spec.name}}", name=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Blocked())
"""


SMOKE = ("resnet50", "gpt2")
"""With the rows of all peers, and of both optimizers."""


@functools.cache
def smoke(folder):
    """What the benchmark prints and writes at tiny sizes, where nothing can be imported that it need not."""
    (folder / "sitecustomize.py").write_text(BLOCK)
    paths = [str(folder), str(BENCHMARKS.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, BENCHMARKS / "gpu.py", "--smoke", "--minutes", "100", "--only", *SMOKE]
    command += ["--output", folder / "gpu.json", "--cache", folder / "cache"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((folder / "gpu.json").read_text())


@pytest.mark.slow
def test_all_of_it_runs_with_jax_flax_optax_and_jmp_alone(tmp_path_factory):
    printed, found = smoke(tmp_path_factory.mktemp("smoke"))
    errors = {
        (name, row_name): row["error"]
        for name, case in found["cases"].items()
        for row_name, row in case["rows"].items()
        if "error" in row
    }
    if importlib.util.find_spec("torch") is None:  # then all of its rows say so
        errors = {key: error for key, error in errors.items() if not key[1].startswith("torch")}
    assert errors == {}
    assert [case["title"] for case in found["cases"].values()] == [str(case) for case in SMALL if case.name in SMOKE]
    for case in found["cases"].values():
        assert len({row["facts"]["parameters"] for row in case["rows"].values() if "facts" in row}) == 1
        assert all(row["seconds_per_step"]["repeats"] == 2 for row in case["rows"].values() if "error" not in row)
    assert found["finished"] is True
    assert printed.endswith(table(found))
