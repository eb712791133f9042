"""A checkpoint of any form of training resumed with any other runs its step."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

from mpjax.commands import build_run, fresh_state, resumed_state, run
from mpjax.config import load_config
from mpjax.errors import PrecisionWarning
from mpjax.loop import adopt, places_in, to_arrays
from mpjax.training import state_shapes


MLP = "--model.name mlp --model.width 8 --data.name synthetic:4x4x1:3 --data.batch_size 24 --steps 4"

FORMS = {
    "sgd": "--optimizer.name sgd --precision.policy float32",
    "ema": "--optimizer.name sgd --precision.policy float32 --training.ema 0.9",
    "adamw": "--optimizer.name adamw --precision.policy mixed_float16 --training.accumulate 2",
    "adamw ema": "--optimizer.name adamw --precision.policy mixed_float16 --training.ema 0.9",
    "masters": "--optimizer.name lamb --precision.policy bfloat16 --training.ema 0.9 --mesh.fsdp 2 --mesh.data 1",
    "masters in float16": "--optimizer.name adamw --precision.policy float16 --optimizer.moments bfloat16",
    "no masters": "--optimizer.name lion --precision.policy bfloat16 --precision.master_weights off --training.ema 0.9",
    "kahan": "--optimizer.name adamw --precision.policy bfloat16 --precision.master_weights kahan --training.ema 0.5",
    "stochastic": "--optimizer.name adamw --precision.policy bfloat16 --precision.master_weights stochastic",
    "moments": "--optimizer.name adamw --optimizer.moments bfloat16 --training.ema 0.9",
    "float8": "--optimizer.name adamw --optimizer.moments float8 --training.accumulate 3",
    "float8 ema": "--optimizer.name adamw --optimizer.moments float8 --training.ema 0.9 --mesh.fsdp 2 --mesh.data 1",
    "divided": "--optimizer.name novograd --precision.policy float32 --training.ema 0.9 --mesh.fsdp 2 --mesh.data 1",
    "adafactor": "--optimizer.name adafactor --precision.policy mixed_bfloat16 --training.ema 0.9",
    "novograd": "--optimizer.name novograd --precision.policy mixed_bfloat16 --training.accumulate 2",
}
QUICK = {("ema", "masters")}
PAIRS = [
    pytest.param(stored, into, marks=() if (stored, into) in QUICK else pytest.mark.slow)
    for into in FORMS
    for stored in FORMS
]


@functools.cache
def parts_of(form):
    config = load_config(f"{MLP} {FORMS[form]}".split())
    built = build_run(config)
    batch = jax.device_put(next(built.batches.from_position(0)), built.batch_sharding)
    return built, batch


@functools.cache
def fresh_of(form):
    built, _ = parts_of(form)
    return jax.device_get(fresh_state(built))


@functools.cache
def stored_of(form):
    """The arrays of a checkpoint after one step, on the host."""
    built, batch = parts_of(form)
    state, _ = built.train_step(built.packing.pack(fresh_state(built)), batch)
    return jax.device_get(to_arrays(built.packing.unpack(state)))


@pytest.fixture(autouse=True, scope="module")
def _small_parts():
    """Arrays of any size are divided over `fsdp`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpjax.training.layout.SMALL", 1)
        yield
    parts_of.cache_clear()
    fresh_of.cache_clear()
    stored_of.cache_clear()


@pytest.mark.parametrize(("stored", "into"), PAIRS)
def test_every_pair_runs_a_step(stored, into, monkeypatch):
    saved = stored_of(stored)
    built, batch = parts_of(into)

    def fresh(built):
        shapes = state_shapes(built.task, built.learner.tx, ema=built.config.training.ema > 0, layout=built.layout)
        return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), fresh_of(into), shapes)

    monkeypatch.setattr("mpjax.commands.build.fresh_state", fresh)  # not compiled for each pair

    def read(shapes):
        place = places_in(shapes)
        on_devices = {name: jax.device_put(value, place(name, value.shape)) for name, value in saved.items()}
        return adopt(shapes, on_devices, same_scaling=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # of what starts afresh
        state = resumed_state(built, read)
    state, metrics = built.train_step(built.packing.pack(state), batch)
    assert (int(state.attempts), bool(jnp.isfinite(metrics["loss"]))) == (2, True)


def test_a_moving_average_of_given_parameters_runs_a_step():
    built, batch = parts_of("ema")
    given = fresh_state(built).params
    state, _ = built.train_step(built.packing.pack(fresh_state(built, given)), batch)
    assert int(state.attempts) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    ["--mesh.data 2 --training.ema 0.9", "--optimizer.name adamw --training.ema 0.9 --mesh.data 1 --mesh.fsdp 2"],
)
def test_a_run_resumed_with_another_form_is_resumed_again_without_flags(other, tmp_path):
    quiet = "--report.no_plot --report.no_tensorboard"
    run(load_config(f"{MLP} {quiet} --output_dir {tmp_path}/a".split()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        run(load_config(f"--resume --output_dir {tmp_path}/a {other} --steps 6".split()))
    assert run(load_config(f"--resume --output_dir {tmp_path}/a --steps 8".split()))["steps"] == 8
