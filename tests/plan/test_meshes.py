"""Which meshes are possible, which are compiled, and why the others are not the best."""

import dataclasses

import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, DATA, FSDP, TENSOR
from mpjax.plan import (
    Choice,
    Expected,
    Sizes,
    choice_of,
    climb,
    ends,
    mesh_of,
    meshes,
    neighbours,
    search_mesh,
    verdict,
)


GPT2 = (
    "--task language_modeling --data.name docstrings --data.length 16 --data.batch_size 32 --model.name gpt2 "
    "--model.width 64 --model.depth 2 --model.heads 4 --model.scan_blocks --precision.policy mixed_bfloat16 --steps 9"
)


def choice(devices: int, *, batch: int = 9 * 4096, accumulate: int = 1, refused: tuple[int, ...] = ()) -> Choice:
    """The meshes of a model without texts, whose heads do not divide among the sizes in `refused`."""

    def refusal(context: int, tensor: int) -> str:
        return "texts" if context > 1 else "heads" if tensor in refused else ""

    found = choice_of(devices, batch=batch, accumulate=accumulate, refusal=refusal)
    return Choice(found.possible, {reason: count for reason, count in found.left_out.items() if reason != "texts"})


def choice_of_texts(devices: int, batch: int) -> Choice:
    return choice_of(devices, batch=batch, accumulate=1, refusal=lambda context, tensor: "")


def test_every_mesh_within_a_host_is_possible():
    assert choice(4) == Choice(
        (Sizes(1, 1, 4), Sizes(1, 2, 2), Sizes(1, 4, 1), Sizes(2, 1, 2), Sizes(2, 2, 1), Sizes(4, 1, 1)), {}
    )
    assert len(choice(6).possible) == 9  # parts of 3 lie in the one host


def test_tensor_stays_within_a_host():
    """16 = data x fsdp x tensor in 15 ways, of which one has 16 parts of a layer."""
    assert {sizes.tensor for sizes in choice(16).possible} == {1, 2, 4, 8}
    assert choice(16).left_out == {"tensor groups reach beyond a host of 8 GPUs": 1}


def test_a_batch_of_fewer_examples_than_gpus_divides_its_texts():
    found = choice_of_texts(8, batch=1)
    assert found.possible == (Sizes(8, 1, 1, 1), Sizes(4, 1, 1, 2), Sizes(2, 1, 1, 4), Sizes(1, 1, 1, 8))
    assert found.left_out == {"a batch of 1 does not divide by data x fsdp": 16}


def test_context_is_within_a_host_or_in_whole_hosts():
    found = choice_of_texts(24, batch=24)
    assert {sizes.context * sizes.tensor for sizes in found.possible} == {1, 2, 4, 8, 24}


def test_fsdp_has_a_part_of_a_host_or_whole_hosts():
    """Of 24 GPUs: 3, 6 and 12 cut hosts apart; 8 and 24 do not."""
    found = choice(24)
    assert {sizes.fsdp * sizes.tensor for sizes in found.possible} == {1, 2, 4, 8, 24}
    assert found.left_out["fsdp x context x tensor is neither within a host of 8 GPUs nor whole hosts"] > 0


def test_a_batch_that_does_not_divide_is_counted():
    found = choice(8, batch=4)
    assert found.left_out == {"a batch of 4 does not divide by data x fsdp": 4}  # 8 x 1, 4 x 2, 2 x 4 and 1 x 8
    assert all(sizes.data * sizes.fsdp <= 4 for sizes in found.possible)
    micro = choice(8, batch=8, accumulate=2).left_out
    assert micro == {"a batch of 8 does not divide by data x fsdp x 2 micro-batches": 4}


def test_a_model_that_does_not_divide_is_counted_by_its_reason():
    found = choice(8, refused=(8,))
    assert found.left_out == {"heads": 1}
    assert {sizes.tensor for sizes in found.possible} == {1, 2, 4}


def test_the_sizes_are_those_of_a_mesh():
    assert Sizes(tensor=8, fsdp=4, data=2, context=3).by_axis == {DATA: 2, FSDP: 4, CONTEXT: 3, TENSOR: 8}


def test_first_comes_what_fills_a_host_and_what_has_most_parts():
    possible = choice(1024).possible
    assert ends((1, 1), possible) == [Sizes(1, 8, 128), Sizes(1, 1024, 1)]
    assert ends((1, 4), possible) == [Sizes(4, 2, 128), Sizes(4, 256, 1)]
    assert ends((1, 8), choice(8).possible) == [Sizes(8, 1, 1)]


def test_neighbours_are_a_size_away():
    possible = choice(64).possible
    assert neighbours(Sizes(2, 16, 2), possible) == [
        Sizes(2, 8, 4),
        Sizes(2, 32, 1),
        Sizes(1, 32, 2),
        Sizes(4, 8, 2),
    ]
    assert neighbours(Sizes(1, 64, 1), possible) == [Sizes(1, 32, 2), Sizes(2, 32, 1)]
    texts = choice_of_texts(64, batch=64).possible
    near = {sizes for sizes in neighbours(Sizes(2, 16, 1, 2), texts) if sizes.data == 1}
    assert near == {
        Sizes(4, 16, 1, 1),
        Sizes(2, 32, 1, 1),
        Sizes(4, 8, 1, 2),
        Sizes(1, 32, 1, 2),
        Sizes(2, 8, 1, 4),
        Sizes(1, 16, 1, 4),
    }


@pytest.fixture
def plans_by(plan_of):
    """Makes plans that wait for `seconds(sizes)` beside 10 s of kernels; where it is None, they do not fit."""

    def of(seconds):
        compiled = []

        def estimate(sizes: Sizes):
            waits = seconds(sizes)
            plan = plan_of("mixed_bfloat16")
            wait = waits or 0.0
            expected = Expected(10 + wait, 20, wait, 30, 10, 10, 1.0, {"fsdp": wait})
            return dataclasses.replace(
                plan,
                mesh=sizes.by_axis,
                limit=0 if waits is None else plan.limit,
                communication=dataclasses.replace(plan.communication, expected=expected),
            )

        def plans(wanted):
            compiled.append(list(wanted))
            return [estimate(sizes) for sizes in wanted]

        return plans, compiled

    return of


def test_the_search_climbs_to_the_fastest(plans_by):
    """The fewest seconds of waiting are at 32 parts with tensor 4; with each factor of 2 away they grow."""

    def waits(sizes: Sizes) -> float:
        parts = sizes.tensor * sizes.fsdp
        return {1: 3.0, 2: 1.5, 4: 0.0, 8: 1.5}[sizes.tensor] + abs(parts.bit_length() - 6)

    plans, compiled = plans_by(waits)
    found = climb(choice(64).possible, plans)
    assert min(found, key=lambda sizes: found[sizes].expected_seconds) == Sizes(4, 8, 2)
    assert compiled[0] == [Sizes(1, 8, 8), Sizes(1, 64, 1), Sizes(2, 4, 8), Sizes(2, 32, 1)]
    assert len(found) < len(choice(64).possible)
    assert [sizes for batch in compiled for sizes in batch] == list(found)


def test_where_nothing_fits_the_search_goes_on_to_more_parts(plans_by):
    plans, compiled = plans_by(lambda sizes: None if sizes.tensor < 8 else 1.0)
    found = climb(choice(64).possible, plans)
    assert [sizes for sizes, plan in found.items() if plan.fits][:2] == [Sizes(8, 1, 8), Sizes(8, 8, 1)]
    assert compiled[1] == [Sizes(4, 2, 8), Sizes(4, 16, 1)]


def test_where_nothing_fits_at_all_the_ends_are_compiled(plans_by):
    plans, compiled = plans_by(lambda _: None)
    assert len(climb(choice(8).possible, plans)) == 4
    assert climb([], plans) == {}
    assert compiled == [[Sizes(1, 8, 1), Sizes(2, 4, 1)], [Sizes(4, 2, 1)], [Sizes(8, 1, 1)]]


def test_a_word_says_why_a_mesh_is_not_the_best(plans_by):
    plans, _ = plans_by(lambda sizes: None if sizes.tensor == 8 else float(sizes.fsdp))
    best, slower, large = plans([Sizes(1, 1, 8), Sizes(1, 8, 1), Sizes(8, 1, 1)])
    assert [verdict(plan, best) for plan in (best, slower, large)] == ["best", "waits for fsdp", "memory"]
    expected = dataclasses.replace(best.communication.expected, step=13.0)
    kernels = dataclasses.replace(best, communication=dataclasses.replace(best.communication, expected=expected))
    assert verdict(kernels, best) == "kernels"


def step_of(flags: str):
    config = load_config(flags.split())
    return planned_step(config, fields_of(config))


def test_a_gpu_without_a_network_has_one_host():
    with pytest.raises(
        UsageError, match="--gpu l4: the network between hosts is not known: write --devices 8, or less"
    ):
        search_mesh("l4", step_of(GPT2), 16)


def test_no_possible_mesh_is_an_error(plugin):
    with pytest.raises(UsageError, match="no mesh of 16 GPUs is possible: .*write --data.batch_size 16, or a multiple"):
        search_mesh("h100", step_of(f"{GPT2} --data.batch_size 1"), 16)


def test_float8_over_tensor_is_left_out_before_it_ends_the_process(plugin, monkeypatch):
    found = []
    monkeypatch.setattr(meshes, "climb", lambda possible, _: found.extend(possible) or {})
    step = step_of(f"{GPT2} --precision.policy mixed_float8")
    assert search_mesh("h100", step, 4).left_out == {
        "float8 over tensor, which ends the compiler of XLA for GPUs (jaxlib 0.12)": 4
    }
    assert {sizes.tensor for sizes in found} == {1}


def test_float8_over_tensor_is_an_error_of_a_plan_and_a_run_before_it_ends_the_process(plugin):
    step = step_of(f"{GPT2} --precision.policy mixed_float8")
    with pytest.raises(UsageError, match="^float8 over --mesh.tensor 2: XLA's compiler ends the process"):
        step.build_on(mesh_of("h100", 2, data=1, tensor=2))


def test_heads_that_do_not_divide_are_left_out_with_the_error_of_a_run(plugin, monkeypatch):
    monkeypatch.setattr(meshes, "climb", lambda possible, _: {})
    found = search_mesh("h100", step_of(f"{GPT2} --model.heads 1"), 2)
    assert found.left_out == {
        "--mesh.tensor 2 does not divide blocks/all/attention/key, which has 1 outputs or heads": 1,
        "context does not divide this run": 1,
    }
