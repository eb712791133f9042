"""A step timed: here on the CPU, whose times say nothing, but whose steps are run."""

import jax
import numpy as np
import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.data import Image, Label, Length, Mask, Numbers, Tokens
from mpjax.plan import is_here, measure, measure_step, random_batch, times_of


@pytest.mark.slow
def test_a_run_s_step_is_run_on_all_devices_and_the_median_of_its_times_counts(small, monkeypatch):
    def two_steps(step, state):
        after = step(step(state))
        assert int(after.step) == 2
        return [1.0, 9.0, 2.0, 3.0, 2.5]

    monkeypatch.setattr(measure, "times_of", two_steps)
    fields = fields_of(small)
    found = measure_step(planned_step(small, fields), fields)
    assert (found.seconds, found.quartiles) == (2.5, pytest.approx((1.5, 6.0)))
    assert (found.peak, found.device) == (None, "cpu")


@pytest.mark.slow
def test_the_step_is_timed_on_the_mesh_that_is_planned(monkeypatch):
    flags = "--data.name synthetic:16x16x1:256 --data.batch_size 8 --model.name mlp --model.width 64 --model.depth 1"
    config = load_config(f"{flags} --mesh.data 1 --mesh.fsdp 2".split())
    fields, held = fields_of(config), []

    def look(step, state):
        held.extend(x.sharding.spec for x in jax.tree.leaves(state.params))
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(measure, "times_of", look)
    measure_step(planned_step(config, fields), fields)
    assert any("fsdp" in spec for spec in held)


@pytest.mark.slow
def test_a_peak_counts_where_no_program_before_took_more(small, monkeypatch):
    fields = fields_of(small)
    step = planned_step(small, fields)
    monkeypatch.setattr(measure, "times_of", lambda step, state: [1.0, 2.0, 3.0])
    for peaks, wanted in (((10, 70), 70), ((70, 70), None), ((None, None), None)):
        said = iter(peaks)
        monkeypatch.setattr(measure, "peak_of", lambda device, said=said: next(said))
        assert measure_step(step, fields).peak == wanted


def test_steps_of_the_warm_up_are_not_counted_and_the_state_goes_on():
    """A clock that only a step moves: by as many seconds as the state says."""
    now = [0.0]

    def step(state):
        now[0] += state
        return state + 1

    assert times_of(step, 1, warm_up=2, repeats=3, clock=lambda: now[0]) == [3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "count", "asked", "wanted"),
    [
        ("NVIDIA H200", 1, ("h200", 1), True),
        ("NVIDIA H200", 1, ("h100", 1), False),
        ("NVIDIA H200", 8, ("h200", 1), False),
        ("NVIDIA H200", 8, ("h200", 8), True),
        ("NVIDIA H100 80GB HBM3", 1, ("h100", 1), True),
        ("NVIDIA A100-SXM4-80GB", 1, ("a100", 1), True),
        ("Tesla V100-SXM2-16GB", 1, ("v100", 1), True),
        ("NVIDIA L4", 1, ("l4", 1), True),
        ("NVIDIA L40S", 1, ("l4", 1), False),
        ("cpu", 1, ("h200", 1), False),
        # Other forms have other rates: an H100 PCIe has 2.0 TB/s, not 3.35.
        ("NVIDIA H100 PCIe", 1, ("h100", 1), False),
        ("NVIDIA H200 NVL", 1, ("h200", 1), False),
        ("NVIDIA A100-PCIE-40GB", 1, ("a100", 1), False),
        ("NVIDIA A100-SXM4-40GB", 1, ("a100", 1), False),
    ],
)
def test_only_so_many_gpus_of_that_kind_are_measured_on(monkeypatch, kind, count, asked, wanted):
    class Device:
        device_kind = kind

    monkeypatch.setattr(jax, "devices", lambda: [Device()] * count)
    assert is_here(*asked) == wanted


def test_batches_hold_what_the_fields_allow():
    fields = {
        "image": Image((4, 4, 3)),
        "label": Label(7),
        "mask": Mask((4, 4), 3),
        "tokens": Tokens(6, 11),
        "length": Length(6),
        "box": Numbers((4,), np.dtype(np.float32)),
        "there": Numbers((), np.dtype(bool)),
    }
    batch = random_batch(fields, 200, seed=0)
    assert {name: (x.shape, str(x.dtype)) for name, x in batch.items()} == {
        "image": ((200, 4, 4, 3), "uint8"),
        "label": ((200,), "int32"),
        "mask": ((200, 4, 4), "int32"),
        "tokens": ((200, 6), "int32"),
        "length": ((200,), "int32"),
        "box": ((200, 4), "float32"),
        "there": ((200,), "bool"),
    }
    largest = {name: (int(np.min(x)), int(np.max(x))) for name, x in batch.items()}
    assert largest == {
        "image": (0, 255),
        "label": (0, 6),
        "mask": (0, 2),
        "tokens": (0, 10),
        "length": (6, 6),
        "box": (0, 0),
        "there": (0, 1),
    }


@pytest.mark.slow
def test_a_step_whose_batches_say_what_to_flip_is_planned_and_measured():
    flags = "--model.name mlp --model.width 4 --data.batch_size 8 --data.flip --data.alternate_flips"
    config = load_config(flags.split())
    step = planned_step(config, fields_of(config))
    assert (step.batch["mirrored"].shape, step.batch["mirrored"].dtype) == ((8,), np.bool_)
    assert measure_step(step, fields_of(config)).seconds > 0
