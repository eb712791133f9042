"""The table of a search for a mesh."""

import dataclasses
import json

import pytest

from mpjax.plan import (
    MESH_HEADS,
    Expected,
    Search,
    Sent,
    Sizes,
    as_json,
    conclusions,
    mesh_rows,
    search_title,
    table_of_meshes,
)


@pytest.fixture
def search(plan_of):
    """A mesh that fits and one that does not, of one of 43.5 GB in 40."""

    def planned(policy: str, tensor: int, wait: float):
        plan = plan_of(policy)
        expected = Expected(0.012 + wait, 0.02, wait, 0.03, 0.011, 0.012, 0.8, {"tensor": wait})
        return dataclasses.replace(
            plan,
            mesh={"data": 4 // tensor, "fsdp": 1, "tensor": tensor},
            tokens=8192,
            communication=dataclasses.replace(
                plan.communication, expected=expected, sent=Sent(3_000_000_000, 500_000_000)
            ),
        )

    plans = (planned("mixed_bfloat16", 2, 0.001), planned("float32", 1, 0.002))
    return Search("h100", 4, plans, {Sizes(1, 1, 4): 90_000_000_000}, 3, {"a batch of 1 does not divide": 2})


def test_each_mesh_has_memory_time_speed_bytes_by_link_and_a_word(search):
    first, second = mesh_rows(search)
    assert len(first) == len(second) == len(MESH_HEADS)
    # 321 launches, 2 and 4 ms of kernels at the measured rates, and 1 ms of waiting.
    seconds = (0.002 / 790 * 990 + 0.004 / 4.3 * 4.8 + 321 * 2e-6) / 0.89 + 0.001
    assert first[:3] == ["2 x 1 x 2", "23.5 GB", f"{1e3 * seconds:.3g} ms"]
    assert first[3] == "11 ms - 30 ms"
    assert float(first[4]) == pytest.approx(100 * 8192 / seconds / 4, rel=1e-3)
    assert first[5:] == ["80.0%", "1 ms", "3 GB", "500 MB", "best"]
    assert (second[0], second[1], second[-1]) == ("4 x 1 x 1", "43.5 GB", "memory")


def test_tokens_are_examples_where_there_are_no_tokens(search):
    assert table_of_meshes(search).columns[4].header == "tokens/s a GPU"
    images = dataclasses.replace(search, plans=tuple(dataclasses.replace(plan, tokens=0) for plan in search.plans))
    assert table_of_meshes(images).columns[4].header == "examples/s a GPU"


def test_the_best_is_told_as_flags_and_what_was_not_compiled_is_counted(search):
    assert conclusions(search) == [
        "best: --mesh.data 2 --mesh.fsdp 1 --mesh.tensor 2",
        "not compiled, state alone is larger than memory: 1",
        "not compiled, beyond meshes that are slower or do not fit: 3",
        "left out, a batch of 1 does not divide: 2",
    ]
    assert search_title(search).splitlines() == [
        "meshes of 4 x NVIDIA H100 80GB HBM3, 100 examples a step, mixed_bfloat16; 40 GB of 84.9 GB for the run",
        "links within a host of 8: 450 GB/s per GPU; between hosts: 50 GB/s per GPU",
    ]


def test_flags_and_json_say_whether_positions_are_divided(search):
    shares = dataclasses.replace(search, plans=(dataclasses.replace(search.plans[0], sequence=True), search.plans[1]))
    assert conclusions(shares)[0] == "best: --mesh.data 2 --mesh.fsdp 1 --mesh.tensor 2 --mesh.sequence"
    assert [mesh["sequence"] for mesh in as_json(shares)["meshes"]] == [True, False]


def test_where_no_mesh_fits_the_smallest_is_named(search):
    large = dataclasses.replace(search, plans=search.plans[1:])
    assert conclusions(large)[0].startswith(
        "no mesh fits: --mesh.data 4 --mesh.fsdp 1 --mesh.tensor 1 takes the least, 43.5 GB of 40 GB; take more GPUs"
    )
    assert as_json(large)["best"] is None
    none = dataclasses.replace(search, plans=())
    assert conclusions(none)[0] == (
        "no mesh fits: parameters and optimizer state alone take 90 GB on each GPU or more; take more GPUs"
    )


def test_json_has_the_values_of_the_table(search):
    result = json.loads(json.dumps(as_json(search)))
    assert result["best"] == {"data": 2, "fsdp": 1, "tensor": 2}
    assert [mesh["why"] for mesh in result["meshes"]] == ["best", "memory"]
    assert [mesh["fits"] for mesh in result["meshes"]] == [True, False]
    assert result["meshes"][0]["bytes"] == 23_500_000_000
    assert result["meshes"][0]["seconds"] == search.plans[0].expected_seconds
    assert result["too_large"] == [{"mesh": {"data": 4, "fsdp": 1, "context": 1, "tensor": 1}, "bytes": 90_000_000_000}]
    assert (result["beyond"], result["left_out"]) == (3, {"a batch of 1 does not divide": 2})
