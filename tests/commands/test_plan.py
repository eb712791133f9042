"""A plan from its settings to what is printed."""

import dataclasses
import json
import math

import pytest

from mpjax import cli
from mpjax.commands import fields_of, plan, plan_run, planned_step
from mpjax.config import Plan, load_config
from mpjax.errors import UsageError
from mpjax.plan import Cost, Measured, Receipt, ReceiptRow, Search


MEASURED = Measured(0.01, (0.009, 0.011), 46_000_000_000, "NVIDIA H100 80GB HBM3")


@pytest.fixture
def planned(monkeypatch, plan_of):
    """Plans of round numbers instead of those of a compiler; gives what was asked for."""
    asked = []

    def estimates(gpus, steps, **settings):
        asked.append((gpus, [step.policy for step in steps], sorted(steps[0].batch), settings))
        return [dataclasses.replace(plan_of(step.policy, gpu), xla=step.xla) for gpu in gpus for step in steps]

    monkeypatch.setattr(plan, "estimates", estimates)
    return asked


def test_the_run_s_own_policy_is_planned_unless_others_are_named(small, planned):
    plan_run(Plan(gpu=("h100",)), small)
    plan_run(Plan(gpu=("h100", "a100"), policies=("float32", "mixed_bfloat16"), devices=4, fit=False), small)
    assert [(gpus, policies) for gpus, policies, _, _ in planned] == [
        (("h100",), ["mixed_float16"]),
        (("h100", "a100"), ["float32", "mixed_bfloat16"]),
    ]
    assert planned[1][2:] == (
        ["image", "label"],
        {
            "devices": 4,
            "attention": "auto",
            "most": 10,
            "memory_fraction": 0.75,
            "fit": False,
            "verify": False,
            "receipts": False,
        },
    )


def test_xla_s_options_have_columns_beside_those_without(small, planned, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    options = "xla_gpu_enable_triton_gemm=false"
    result = plan_run(Plan(gpu=("h100",), policies=("float32", "bfloat16"), xla=(options,)), small)
    assert [(plan["policy"], plan["xla"]) for plan in result["plans"]] == [
        ("float32", ""),
        ("float32", options),
        ("bfloat16", ""),
        ("bfloat16", options),
    ]
    assert "triton_gemm=false" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["triton=1", "xla_gpu_autotune_level", "xla_gpu_autotune_level="])
def test_a_word_that_is_no_option_of_xla_is_an_error(small, words):
    with pytest.raises(UsageError, match=f"--xla has '{words}': wanted xla_NAME=VALUE"):
        plan_run(Plan(gpu=("h100",), xla=(words,)), small)


def test_the_costliest_kernels_are_listed_with_module_and_line(small, plan_of, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    costs = [Cost(4_000_000_000, 12, "loop_add_fusion", "blocks/*/mlp", True, "/x/site-packages/flax/nnx/linear.py:7")]
    monkeypatch.setattr(plan, "estimates", lambda *_, **__: [dataclasses.replace(plan_of(), costliest=costs)])
    plan_run(Plan(gpu=("h100",)), small)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "loop_add_fusion" in line)
    assert row.split()[:4] == ["4", "GB", "50.0%", "12"]
    assert row.split()[4:] == ["loop_add_fusion", "blocks/*/mlp", "backward", "flax/nnx/linear.py:7"]


def test_a_receipt_is_printed_below_the_table_and_is_in_the_result(small, plan_of, monkeypatch, capsys):
    row = ReceiptRow(
        "head", "forward", "product", "float16", "float32", "float32", "float32", "Triton", 1, "wider", "because"
    )
    receipt = Receipt("NVIDIA H100", "mixed_float16", (row,))
    monkeypatch.setattr(plan, "estimates", lambda *_, **asked: [dataclasses.replace(plan_of(), receipt=receipt)])
    result = plan_run(Plan(gpu=("h100",), receipt=True), small)
    said = capsys.readouterr().out.splitlines()
    start = said.index("what runs, with float32")
    assert "float16 asked; NVIDIA H100 computes 1 of 1 products in float32 (wider)" in said[start + 1]
    assert said[start + 5].endswith("wider (lost speed): because")
    assert result["plans"][0]["receipt"]["rows"][0]["operands"] == "float32"


def test_a_table_for_each_gpu_and_what_is_left_out_are_printed(small, planned, capsys):
    plan_run(Plan(gpu=("h100", "a100"), policies=("float32", "mixed_bfloat16")), small)
    said = capsys.readouterr().out
    assert said.count("per step and GPU") == 2
    assert "NVIDIA A100-SXM4-80GB: 100 examples a step" in said
    assert "Traffic is an upper bound" in said


def test_the_time_on_more_gpus_is_printed_where_there_are_several(small, planned, capsys):
    plan_run(Plan(gpu=("h100",), policies=("float32", "mixed_bfloat16"), devices=4), small)
    said = capsys.readouterr().out.splitlines()
    start = said.index("expected step and efficiency, 25 examples on each GPU, --mesh.data grows")
    assert said[start + 2].split() == ["GPUs", "float32", "mixed_bfloat16"]
    assert said[start + 4].split() == ["8", "10", "ms", "80.0%", "10", "ms", "80.0%"]
    assert max(map(len, said[start : start + 5])) <= 80
    assert any(line.startswith("Expected times take kernels and links at their full rates") for line in said)
    plan_run(Plan(gpu=("h100",), policies=("float32",)), small)
    assert "grows" not in capsys.readouterr().out


def test_json_has_every_number(small, planned, capsys):
    result = plan_run(Plan(gpu=("h100",), policies=("float32", "bfloat16"), json=True), small)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result))
    first, second = result["plans"]
    assert (result["model"], result["data"], first["device"]) == ("mlp", "synthetic:8x8x1:10", "NVIDIA H100 80GB HBM3")
    assert (first["memory"]["total"], first["fits"], second["fits"]) == (43_500_000_000, False, True)
    assert first["roofline"] == {
        "compute": 0.002,
        "traffic": 0.008,
        "seconds": 0.008,
        "serial": 0.01,
        "bound": "traffic",
    }
    # Products and copies at the measured shares of their rates, 321 launches; a part of that, and 2 ms of waiting.
    serial = 0.002 / 790 * 990 + 0.008 / 4.3 * 4.8 + 321 * 2e-6
    assert first["expected_seconds"] == pytest.approx(serial / 0.89 + 0.002)
    assert (first["items_per_second"], first["fit"]) == (12500, {"batch": 150, "compiled": False})
    assert first["communication"] == {
        "bytes": {"all-reduce": {"f32": {"data": 1_000_000_000}}},
        "timing": {"communication": 0.004, "exposed": 0.002, "step": 0.01},
        "grows": "data",
        "scaling": [
            {"devices": 1, "timing": {"communication": 0, "exposed": 0, "step": 0.008}, "efficiency": 1.0},
            {"devices": 8, "timing": {"communication": 0.004, "exposed": 0.002, "step": 0.01}, "efficiency": 0.8},
        ],
        "sent": None,
        "expected": None,
    }
    assert (first["traffic"]["collectives"], first["measured"]) == ({"all-reduce": {"f32": 1_000_000_000}}, None)


def test_a_search_prints_the_meshes_or_the_same_as_json(small, plan_of, monkeypatch, capsys):
    asked = []

    def search_mesh(gpu, step, devices, **settings):
        asked.append((gpu, step.policy, devices, settings["memory_fraction"]))
        settings["say"]("compiling")
        plan = dataclasses.replace(
            plan_of("mixed_bfloat16", gpu), mesh={"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
        )
        return Search(gpu, devices, (plan,), {}, 0, {"no reason": 7})

    monkeypatch.setattr(plan, "search_mesh", search_mesh)
    settings = Plan(gpu=("h100", "b200"), devices=8, search="mesh", memory_fraction=0.9)
    result = plan_run(settings, small)
    printed = capsys.readouterr()
    assert asked == [("h100", "mixed_float16", 8, 0.9), ("b200", "mixed_float16", 8, 0.9)]
    assert printed.out.count("best: --mesh.data 8 --mesh.fsdp 1 --mesh.context 1 --mesh.tensor 1") == 2
    assert "left out, no reason: 7" in printed.out
    assert "There are no stages of a pipeline" in " ".join(printed.out.split())
    assert printed.err.splitlines() == ["compiling", "compiling"]
    plan_run(dataclasses.replace(settings, json=True), small)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result))
    assert result["search"][0]["best"] == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
    assert len(result["plans"]) == 2


def test_the_run_s_own_mesh_and_a_search_for_one_are_refused_together(small):
    config = dataclasses.replace(small, mesh=dataclasses.replace(small.mesh, fsdp=2))
    with pytest.raises(UsageError, match="--mesh.fsdp 2 is what --search mesh chooses"):
        plan_run(Plan(gpu=("h100",), devices=8, search="mesh"), config)


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_a_decoder_is_planned_from_its_config_alone(tmp_path):
    """Llama 3 8B has 8,030,261,248 parameters; no file of weights and no tokenizer is there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    flags = "--task language_modeling --data.name docstrings --data.length 8192 --data.batch_size 64"
    config = load_config([*flags.split(), "--model.name", f"hf:{tmp_path}", "--model.scan_blocks"])
    step = planned_step(config, fields_of(config, vocabulary=128256))
    assert sum(math.prod(param.shape) for param in step.state.params.values()) == 8_030_261_248
    assert (step.tokens, step.batch_size) == (8192, 64)


def test_a_plot_is_drawn_where_it_is_asked_for(small, planned, tmp_path, capsys):
    file = tmp_path / "plan.png"
    plan_run(Plan(gpu=("h100",), plot=str(file)), small)
    assert file.stat().st_size > 10_000
    assert f"plot: {file}" in capsys.readouterr().out


def test_where_the_gpu_is_present_steps_that_fit_are_measured(small, planned):
    """The float32 run of the example does not fit."""
    measured = []

    def measure(step, fields):
        measured.append(step.policy)
        return MEASURED

    settings = Plan(gpu=("a100", "h100"), policies=("float32", "mixed_bfloat16"), devices=4)
    result = plan_run(settings, small, present=lambda gpu, count: (gpu, count) == ("h100", 4), measure=measure)
    assert measured == ["mixed_bfloat16"]
    seconds = [plan["measured"] and plan["measured"]["seconds"] for plan in result["plans"]]
    assert seconds == [None, None, None, 0.01]


def test_what_takes_least_is_measured_first(small, planned, plan_of, monkeypatch):
    """A device tells the most that was in use since the process began."""
    measured = []
    plans = [dataclasses.replace(plan_of(policy), limit=10**12) for policy in ("float32", "bfloat16")]
    monkeypatch.setattr(plan, "estimates", lambda *_, **__: plans)

    def measure(step, fields):
        measured.append(step.policy)
        return MEASURED

    settings = Plan(gpu=("h100",), policies=("float32", "bfloat16"))
    result = plan_run(settings, small, present=lambda *_: True, measure=measure)
    assert measured == ["bfloat16", "float32"]
    assert [plan["policy"] for plan in result["plans"]] == ["float32", "bfloat16"]


def test_measuring_can_be_left_out(small, planned):
    def measure(step, fields):
        raise AssertionError("measured")

    plan_run(
        Plan(gpu=("h100",), policies=("bfloat16",), measure=False), small, present=lambda *_: True, measure=measure
    )


def test_settings_that_make_no_plan_are_refused(small):
    with pytest.raises(UsageError, match="--gpu has h100 twice"):
        plan_run(Plan(gpu=("h100", "h100")), small)


def test_the_command_plans_a_configuration_without_its_data(plugin, capsys):
    run = "--data.name imagenet2012 --data.image_size 32 --data.batch_size 16 --model.name mlp --model.width 8"
    code = cli.plan([*run.split(), "--gpu", "a100", "--json", "--no_fit", "--precision.policy", "mixed_bfloat16"])
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert (code, plan["gpu"], plan["policy"], plan["batch"]) == (0, "a100", "mixed_bfloat16", 16)
    parameters = (32 * 32 * 3 * 8 + 8) + (8 * 8 + 8) + (8 * 1000 + 1000)
    assert plan["memory"]["parameters"] == 4 * parameters


def test_the_command_refuses_a_gpu_that_is_in_no_table(capsys):
    assert cli.plan(["--gpu", "h300"]) == 2
    assert "invalid choice 'h300'" in capsys.readouterr().err
