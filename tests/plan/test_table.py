"""Plans as text, and what float8 is worth in them."""

import dataclasses

import pytest

from mpjax.plan import Expected, LayerSavings, Roofline, Sent, comparisons, duration, plan_table, rows, size, title


def test_a_title_says_what_is_asked_of_which_gpu(plan_of):
    assert title([plan_of()]) == (
        "NVIDIA H100 80GB HBM3: 100 examples a step over 4 GPUs; 40 GB of 84.9 GB for the run, 3350 GB/s, "
        "990 TFLOP/s in float16"
    )


def test_policies_stand_side_by_side(plan_of):
    found = dict(rows([plan_of(), plan_of("mixed_bfloat16")]))
    assert found["  temporary"] == ["40 GB", "20 GB"]
    assert found["  total at the peak"] == ["43.5 GB", "23.5 GB"]
    assert found["  does it fit?"] == ["no", "yes"]
    assert found["largest batch that fits"] == ["150 (estimated)", "300 (estimated)"]
    assert (found["arithmetic"], found["  in"]) == (["3 TFLOP", "3 TFLOP"], ["tf32 100%", "bfloat16 100%"])
    assert found["traffic"] == ["8 GB", "4 GB"]
    assert found["attention by"] == ["xla", "cudnn"]
    assert (found["time of arithmetic"], found["time of traffic"]) == (["2 ms", "2 ms"], ["8 ms", "4 ms"])
    assert found["bound by"] == ["traffic", "traffic"]
    assert found["all-reduce f32, data"] == ["1 GB", "1 GB"]
    assert (found["time of communication"], found["  exposed"]) == (["4 ms", "4 ms"], ["2 ms", "2 ms"])
    assert found["expected step"] == ["10 ms", "10 ms"]
    assert found["examples/s at best"] == ["12500", "25000"]
    assert found["  without overlap"] == ["10000", "16667"]
    assert found["  to expect"] == ["6422", "9475"]
    assert found["  with communication"] == ["10000", "10000"]
    assert found["MFU to expect"] == ["12.8%", "18.9%"]  # 2 ms of arithmetic
    assert not {"tokens/s to expect", "measured tokens/s", "HFU to expect"} & found.keys()


def test_texts_have_tokens_a_second_and_large_models_three_digits(plan_of):
    plan = dataclasses.replace(plan_of(measured=True), tokens=1024, batch=1)
    found = dict(rows([plan]))
    assert found["  to expect"] == ["64.2"]
    assert found["tokens/s to expect"] == ["65762"]
    assert found["measured tokens/s"] == ["102400"]


def test_products_that_are_computed_again_count_for_the_hardware_alone(plan_of):
    found = dict(rows([dataclasses.replace(plan_of(), recomputes=True)]))
    assert found["HFU to expect"] == ["12.8%"]
    assert "MFU to expect" not in found


def test_collectives_stand_by_kind_dtype_and_axes_with_none_where_a_policy_has_none(plan_of):
    first, second = plan_of(), plan_of("mixed_bfloat16")
    other = dataclasses.replace(second.communication, bytes={"all-gather": {"bf16": {"fsdp": 7, "data+fsdp": 8}}})
    found = rows([first, dataclasses.replace(second, communication=other)])
    lines = {
        ("all-gather bf16, data+fsdp", ("", "8 B")),
        ("all-gather bf16, fsdp", ("", "7 B")),
        ("all-reduce f32, data", ("1 GB", "")),
    }
    assert lines <= {(label, tuple(cells)) for label, cells in found}


@pytest.mark.parametrize("change", [{"bytes": {}}, {"timing": None}])
def test_without_communication_or_a_known_network_there_is_no_time_with_it(plan_of, change):
    plan = plan_of()
    plan = dataclasses.replace(plan, communication=dataclasses.replace(plan.communication, **change))
    labels = dict(rows([plan])).keys()
    assert not {"time of communication", "  exposed", "expected step", "  with communication"} & labels


def test_the_time_to_expect_stands_between_its_bounds_with_the_bytes_of_each_link(plan_of):
    plan = plan_of()
    expected = Expected(0.012, 0.004, 0.001, 0.015, 0.011, 0.0108, 0.9, {"data": 0.004})
    sent = Sent(3_000_000_000, 500_000_000)
    change = dataclasses.replace(plan.communication, expected=expected, sent=sent)
    found = dict(rows([dataclasses.replace(plan, communication=change), plan]))
    # 13.6 ms of kernels, as above, and 1 ms of waiting; without an expectation, 2 ms.
    assert (found["step to expect"], found["  to expect"]) == (["14.6 ms", ""], ["6863", "6422"])
    assert (found["  all hidden"], found["  none hidden"]) == (["11 ms", ""], ["15 ms", ""])
    assert found["  efficiency against one host"] == ["90.0%", ""]
    assert (found["sent by each GPU, in its host"], found["  to other hosts"]) == (["3 GB", ""], ["500 MB", ""])
    assert "sent by each GPU, in its host" not in dict(rows([plan]))


def test_lines_without_anything_to_say_are_left_out(plan_of):
    labels = dict(rows([plan_of()]))
    assert not {"  statistics, average", "  other outputs", "measured step", "measured peak memory"} & labels.keys()


def test_a_measurement_stands_beside_its_prediction(plan_of):
    found = dict(rows([plan_of(), plan_of("mixed_bfloat16", measured=True)]))
    assert found["measured step"] == ["", "10 ms (40% of the roofline)"]
    assert found["measured examples/s"] == ["", "10000"]
    assert found["measured peak memory"] == ["", "46 GB (planned -49%)"]


def test_a_second_copy_of_the_state_would_show(plan_of):
    plan = plan_of()
    copied = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, extra=3_000_000_000))
    assert dict(rows([copied]))["  other outputs"] == ["3 GB"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (7, "7 B"), (1234, "1.23 kB"), (5e6, "5 MB"), (1.5e9, "1.5 GB"), (2e12, "2 TB")]
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.5, "1.5 s"), (0.0238, "23.8 ms"), (4e-6, "4 us"), (0, "0 s")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_table_has_a_column_for_each_policy(plan_of):
    table = plan_table([plan_of(), plan_of("mixed_bfloat16")])
    assert [column.header for column in table.columns] == ["per step and GPU", "float32", "mixed_bfloat16"]
    assert table.row_count == len(rows([plan_of(), plan_of("mixed_bfloat16")]))


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(0.001, "may win: its step is expected to take 0.87"), (0.003, "loses")],
    ids=["may win", "loses"],
)
def test_a_plan_says_what_float8_is_to_the_same_without(plan_of, seconds, verdict):
    other = dataclasses.replace(plan_of("mixed_bfloat16"), roofline=Roofline(compute=0.002, traffic=0.004))
    layers = (LayerSavings("blocks/*/up", 3e-4, 1e-4, 18), LayerSavings("blocks/*/out", 1e-4, 2e-4, 18))
    plan = dataclasses.replace(other, policy="mixed_float8", roofline=Roofline(seconds, 0.004), float8=layers)
    first, second, *rest = comparisons([other, plan])
    assert first.startswith(f"mixed_float8 {verdict}")
    assert "launches +0.00 ms. Temporary memory +0.00 GB. The one step that was timed, GPT-2 small on" in first
    assert second == (
        'float8 may not pay in 1 of 2 kinds of layers; without it there: --precision.rules "blocks/*/out" bfloat16'
    )
    assert rest == [
        '  "blocks/*/out": products save 100 us, 18 kernels of conversion take at most 200 us',
    ]


def test_layers_that_lose_with_float8_are_to_compute_as_the_policy_does(plan_of):
    layers = (LayerSavings("up", 1e-4, 2e-4, 18),)
    plan = dataclasses.replace(plan_of(), policy="compute=float32,products=float8", float8=layers)
    assert comparisons([plan_of(), plan])[1].endswith('--precision.rules "up" float32')


@pytest.mark.parametrize(
    ("policy", "others", "flags"),
    [
        ("mixed_float8", [], "mixed_bfloat16 mixed_float8"),
        ("mixed_mxfp8;head=float32", ["float32"], "mixed_bfloat16 'mixed_mxfp8;head=float32'"),
        ("compute=float32,products=float8", ["mixed_bfloat16"], "float32 compute=float32,products=float8"),
    ],
)
def test_a_plan_without_one_to_compare_it_with_says_what_to_write(plan_of, policy, others, flags):
    other = dataclasses.replace(plan_of("mixed_bfloat16"), roofline=Roofline(compute=0.002, traffic=0.004))
    plan = dataclasses.replace(other, policy=policy, float8=(LayerSavings("blocks/*/up", 3e-4, 1e-4, 18),))
    lines = comparisons([*(dataclasses.replace(other, policy=each) for each in others), plan])
    assert lines == [f"to see what float8 saves in {policy}: --policies {flags}"]


def test_plans_without_float8_are_not_compared(plan_of):
    assert comparisons([plan_of("mixed_bfloat16"), plan_of("float32")]) == []
