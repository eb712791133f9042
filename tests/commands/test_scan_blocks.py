"""A run whose blocks are one loop: the same training, and its files are those of any other run."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from mpjax import cli
from mpjax.commands import build_run, diagnose_run, fields_of, fresh_state, planned_step, resumed_state, run
from mpjax.config import Diagnose, load_config
from mpjax.errors import UsageError
from mpjax.loop import adopt, read_checkpoint, to_arrays
from mpjax.models import apart
from mpjax.precision.casting import bodies, equations
from mpjax.training import make_mesh, pretrained_arrays


pytestmark = pytest.mark.slow  # each runs whole commands; what they are made of has tests of its own


VIT = (
    "--model.name vit_ti16 --model.width 8 --model.depth 2 --model.heads 2 --model.patch 4 --data.name digits "
    "--data.batch_size 16 --data.eval_batch_size 100 --steps 4 --optimizer.name adamw --optimizer.warmup 0 "
    "--optimizer.learning_rate 1e-3 "
)
FORMS = ("--model.no_scan_blocks", "--model.scan_blocks")


def config_of(flags, base=VIT):
    return load_config(f"{base} {flags}".split())


def trained(flags, steps=2):
    """The state after some steps, and the metrics of each."""
    config = config_of(flags)
    built = build_run(config)
    state, found = fresh_state(built), []
    for batch, _ in zip(built.batches.from_position(0), range(steps), strict=False):
        state, metrics = built.train_step(state, jax.device_put(batch, built.batch_sharding))
        found.append(dict(jax.device_get(metrics)))
    return config, built, state, found


EVERYTHING = (
    "--model.dropout 0.2 --training.accumulate 2 --training.ema 0.5 --optimizer.clip_norm 0.1 --training.remat dots"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"{EVERYTHING} --precision.policy float32 --precision.loss_scale 1024",
        "--precision.policy O1 --precision.loss_scale 1024 --precision.rules blocks/*/mlp/up float32",
    ],
    ids=["everything", "autocast"],
)
def test_steps_are_those_of_single_blocks(flags):
    """With the random numbers of dropout, and with rules of autocast, which finds operations by their names."""
    (_, _, single, metrics), (_, built, stacked, others) = (trained(f"{flags} {form}") for form in FORMS)
    half = "O1" in flags
    for one, other in zip(metrics, others, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-3 if half else 2e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2 if half else 1e-5)
        assert other["finite"] == 1
    rows = built.block_by_block(stacked)
    assert jax.tree.structure(rows) == jax.tree.structure(single)
    if not half:
        for path, value in single.params.items():
            np.testing.assert_allclose(rows.params[path], value, rtol=0, atol=2e-5, err_msg=path)
            np.testing.assert_allclose(rows.ema[path], single.ema[path], rtol=0, atol=2e-5, err_msg=path)


@pytest.mark.slow
def test_a_skipped_step_of_a_stack_changes_nothing():
    """A loss scale of 2^127 makes gradients overflow."""
    flags = "--precision.policy mixed_float16 --precision.initial_scale 8388608 --precision.max_scale 8388608"
    _, built, state, (metrics,) = trained(f"{flags} {FORMS[1]}", steps=1)
    assert metrics["finite"] == 0
    before = fresh_state(built)
    for name, value in state.params.items():
        np.testing.assert_array_equal(value, before.params[name])


@pytest.mark.slow
def test_the_step_has_as_many_equations_and_arrays_for_six_blocks_as_for_three():
    def counts(depth):
        config = config_of(f"--model.depth {depth} --optimizer.clip_norm 1 --precision.policy mixed_float16 {FORMS[1]}")
        step, given = planned_step(config, fields_of(config)).on(make_mesh(jax.devices()[:1]))
        return sum(1 for _ in equations(step.trace(*given).jaxpr)), len(jax.tree.leaves(given))

    assert counts(3) == counts(6)
    assert counts(3)[0] > 500


WITH_ALL = "--precision.policy bfloat16 --precision.stochastic_rounding --optimizer.moments bfloat16 --training.ema 0.9"


def test_a_checkpoint_goes_from_blocks_to_a_stack_and_back_with_every_bit():
    """Parameters, moments, master weights, averages, counters."""
    _, _, state, _ = trained(f"{WITH_ALL} {FORMS[0]}", steps=2)
    first = {name: np.asarray(leaf) for name, leaf in to_arrays(state).items()}
    saved = first
    for form in (FORMS[1], FORMS[0]):
        config = config_of(f"{WITH_ALL} {form}")
        state = resumed_state(build_run(config), lambda shapes, saved=saved: adopt(shapes, saved))
        saved = {name: np.asarray(leaf) for name, leaf in to_arrays(state).items()}
        assert any("blocks/all/" in name for name in saved) == (form == FORMS[1])
    assert saved.keys() == first.keys()
    assert all(saved[name].dtype == first[name].dtype for name in first)
    assert all(saved[name].tobytes() == first[name].tobytes() for name in first)


@pytest.mark.slow
def test_a_checkpoint_of_more_blocks_is_of_another_model():
    arrays = to_arrays(trained(FORMS[0], steps=0)[2])
    config = config_of(f"--model.depth 3 {FORMS[1]}")
    built = build_run(config)
    with pytest.raises(
        UsageError, match=r"shape: params/blocks/all/attention/key/bias is \(2, 2, 4\), wanted \(3, 2, 4\)"
    ):
        adopt(fresh_state(built), jax.device_get(arrays))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of two steps with blocks one by one, resumed as a loop for two more, and one that is a loop all along."""
    resumed, loop = (tmp_path_factory.mktemp("runs") / name for name in ("resumed", "loop"))
    quiet = "--report.no_plot --report.no_tensorboard --loop.save_every 2 --loop.eval_every 2 --loop.keep 9"
    for folder, form, steps, more in (
        (resumed, FORMS[0], 2, ""),
        (resumed, FORMS[1], 4, "--resume"),
        (loop, FORMS[1], 4, "--diagnosis.every 2"),
    ):
        run(config_of(f"--output_dir {folder} {quiet} {form} --steps {steps} {more} --optimizer.schedule constant"))
    return resumed, loop


def arrays_of(folder, position):
    return read_checkpoint(folder / "checkpoints", position)[1]


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_a_loop(folders):
    resumed, loop = (arrays_of(folder, "4") for folder in folders)
    assert resumed.keys() == loop.keys()
    assert "params/blocks/0/mlp/up/kernel" in arrays_of(folders[0], "2")
    for name, value in loop.items():
        if name.startswith("params/"):
            np.testing.assert_allclose(resumed[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_commands_read_both_checkpoints_of_a_run_that_changed_its_form(folders, tmp_path, recwarn):
    for position in ("2", "4"):
        assert cli.evaluate(["--run", str(folders[0]), "--checkpoint", position]) == 0
        file = tmp_path / f"{position}.safetensors"
        assert cli.export(["--run", str(folders[0]), "--checkpoint", position, "--output", str(file)]) == 0
        saved = arrays_of(folders[0], position)
        saved = apart(
            {n.removeprefix("params/"): x for n, x in saved.items() if n.startswith("params/")}, {"blocks": 2}
        )
        tensors = load_file(file)
        assert tensors.keys() == {name.replace("/", ".") for name in saved}
        assert all(np.array_equal(tensors[name.replace("/", ".")], x) for name, x in saved.items())
    assert not [warning for warning in recwarn if "another run" in str(warning.message)]


@pytest.mark.slow
def test_exported_weights_start_both_forms(folders, tmp_path):
    file = tmp_path / "a.safetensors"
    assert cli.export(["--run", str(folders[0]), "--output", str(file)]) == 0
    states = []
    for form in FORMS:
        config = config_of(f"--model.pretrained {file} --model.pretrained_skip blocks/1/mlp/* {form}")
        built = build_run(config)
        arrays, report = pretrained_arrays(built.task, config.model)
        assert "blocks/1/mlp/up/kernel" in report.skipped
        states.append(built.block_by_block(fresh_state(built, arrays)).params)
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_layers_are_read_block_by_block(folders):
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines()
    found = json.loads(next(line for line in lines if '"layers"' in line))["layers"]
    for direction in ("forward", "backward"):
        assert {"blocks/0/mlp/up", "blocks/1/mlp/up"} <= set(found[direction])
    assert "blocks/1/mlp/up/kernel" in found["update"]


@pytest.mark.slow
def test_a_diagnosis_looks_at_the_blocks_one_by_one(folders):
    found = diagnose_run(Diagnose(run=str(folders[1]), step=3))
    assert found.verdict == "healthy"
    assert {"blocks/0/mlp/up", "blocks/1/mlp/up"} <= {row.path for row in found.table}


def test_master_weights_of_a_loop_are_looked_at_one_by_one(tmp_path):
    quiet = "--report.no_plot --report.no_tensorboard --loop.save_every 2 --loop.eval_every 2"
    run(
        config_of(
            f"--output_dir {tmp_path} {quiet} --model.scan_blocks --precision.policy bfloat16 --diagnosis.every 2"
        )
    )
    assert '"blocks/1/mlp/up/kernel"' in (tmp_path / "metrics.jsonl").read_text()
    found = diagnose_run(Diagnose(run=str(tmp_path), step=3))
    assert {"blocks/0/mlp/up", "blocks/1/mlp/up"} <= {row.path for row in found.table}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--precision.rules blocks/1/mlp float32", r"--precision.rules 'blocks/1/mlp' is for some of the 2 blocks"),
        ("--mesh.rules blocks/1/mlp/up whole", r"--mesh.rules 'blocks/1/mlp/up' is for some of the 2 blocks"),
    ],
)
def test_settings_for_single_blocks_are_errors(flags, message):
    with pytest.raises(UsageError, match=message):
        build_run(config_of(f"--precision.policy mixed_float16 {flags} {FORMS[1]}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ["--precision.policy float32", "--precision.policy mixed_bfloat16 --training.remat full"]
)
def test_a_stack_that_is_divided_over_fsdp_trains_as_single_blocks_do(more, monkeypatch):
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    flags = f"--precision.loss_scale none --optimizer.name sgd {more} --mesh.data 1 --mesh.fsdp 2"
    (*_, single), (_, built, _, stacked) = (trained(f"{flags} {form}") for form in FORMS)
    up = built.layout.spec("blocks/all/mlp/up/kernel")
    assert up == PartitionSpec(None, None, "fsdp")
    rel = 1e-5 if "float32" in more else 2e-2
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in stacked] == pytest.approx([step[name] for step in single], rel=rel)


@pytest.mark.slow
def test_each_block_of_a_divided_stack_gathers_in_half_precision_and_in_the_backward_pass_again(monkeypatch):
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    config = config_of(f"--mesh.data 1 --mesh.fsdp 2 --precision.policy mixed_bfloat16 {FORMS[1]}")
    step, given = planned_step(config, fields_of(config)).on(make_mesh(data=1, fsdp=2))
    loops = [
        eqn.params["jaxpr"]
        for body in bodies(step.trace(*given).jaxpr)
        for eqn in body.eqns
        if eqn.primitive.name == "scan"
    ]
    gathered = [
        sorted(
            f"{eqn.outvars[0].aval.dtype}{list(eqn.outvars[0].aval.shape)}"
            for _, eqn in equations(loop)
            if eqn.primitive.name == "all_gather" and eqn.outvars[0].aval.size >= 64
        )
        for loop in loops
    ]
    kernels = ["bfloat16[2, 4, 8]", *["bfloat16[8, 2, 4]"] * 3, "bfloat16[32, 8]", "bfloat16[8, 32]"]
    assert gathered == [sorted(kernels)] * 2


@pytest.mark.slow
def test_a_stack_is_divided_over_tensor_as_its_blocks_are():
    config = config_of(f"--mesh.data 1 --mesh.tensor 2 {FORMS[1]}")
    spec = fresh_state(build_run(config)).params["blocks/all/mlp/up/kernel"].sharding.spec
    assert spec == PartitionSpec(None, None, "tensor")
