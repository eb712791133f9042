"""The receipt of a program: what an H200 runs, and how it reads as one line, a table, JSON and an assertion."""

import concurrent.futures
import dataclasses
import functools
import json

import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.errors import DtypeError
from mpjax.plan import GPUS, Receipt, ReceiptRow, receipt_of, start, target_of_gpu


def row(path="head", operands="float16", verdict="as asked", *, count=1, kind="product", asked="float16", **more):
    return ReceiptRow(path, "forward", kind, asked, operands, "float32", operands, "Triton", count, verdict, **more)


def receipt(*rows, device="NVIDIA H200"):
    return Receipt(device, "mixed_float16", rows)


WIDE = row("blocks/1/up", "float32", "wider", reason="XLA computes it in float32")
CPU = row("blocks/1/up", "float32", "wider", count=62, reason="a CPU computes in float32", device_limit=True)


def test_the_line_says_how_many_products_are_as_asked():
    assert receipt(row(count=60), row(count=2, kind="attention")).line == "float16 as asked in 62 of 62 products"
    assert (
        receipt(CPU, device="this CPU").line == "float16 asked; this CPU computes 62 of 62 products in float32 (wider)"
    )
    line = receipt(row(), WIDE, row("x", "", "missing"), row(asked="float32", operands="float32")).line
    assert line == (
        "float16 asked; NVIDIA H200 computes 1 of 3 products in float32 (wider), 1 of 3 products missing; "
        "float32 as asked in 1 of 1 products"
    )


def test_products_that_nobody_asked_for_are_counted_apart():
    more = row("", "float32", "unknown", reason="no such product is in the traced function")
    assert receipt(row(), more).line == (
        "float16 as asked in 1 of 1 products; 1 more products that the function does not ask for"
    )


def test_other_rows_are_in_the_line_only_if_they_are_not_as_asked():
    total = row("", "float16", "narrower", kind="reduction", asked="float32")
    assert receipt(row(), row(kind="update")).line == "float16 as asked in 1 of 1 products"
    assert receipt(row(), total).line == "float16 as asked in 1 of 1 products; 1 of 1 sums over devices narrower"


def test_products_that_run_in_no_fewer_bits_than_asked_and_are_narrower_are_counted_without_that_dtype():
    assert receipt(row(operands="float32", verdict="narrower"), row()).line == (
        "float16 asked; 1 of 2 products narrower"
    )


def test_a_recipe_without_a_product_is_said_in_the_line_and_fails():
    found = receipt(row(), row("*", "", "missing", kind="recipe", asked="float8_e4m3fn", reason="none"))
    assert found.line == "float16 as asked in 1 of 1 products; float8 asked, missing in all products"
    with pytest.raises(DtypeError, match=r"\*, forward recipe: asked in float8_e4m3fn, missing: none"):
        found.require()


def test_notes_are_printed_and_are_no_faults():
    found = dataclasses.replace(receipt(row()), notes=("no update was looked at",))
    assert str(found).splitlines()[-2:] == ["", "no update was looked at"]
    assert found.as_json()["notes"] == ("no update was looked at",)
    assert found
    found.require()


def test_require_names_each_offender_and_what_it_lost():
    receipt(row()).require()
    with pytest.raises(DtypeError) as error:
        receipt(row(), WIDE).require()
    assert str(error.value).splitlines() == [
        "NVIDIA H200 does not run what was asked for: "
        "float16 asked; NVIDIA H200 computes 1 of 2 products in float32 (wider)",
        "  blocks/1/up, forward product: asked in float16, runs in float32, wider (lost speed): "
        "XLA computes it in float32",
    ]


def test_products_of_blocks_share_a_line_only_if_they_are_alike():
    first, second = (row(f"blocks/{i}/up", "float32", "wider") for i in (0, 1))
    other = dataclasses.replace(second, asked="bfloat16")
    assert [line.partition(",")[0] for line in receipt(first, second).faults] == ["blocks/*/up"]
    assert [line.partition(",")[0] for line in receipt(first, other).faults] == ["blocks/0/up", "blocks/1/up"]


def test_what_a_device_cannot_do_otherwise_is_one_line_and_may_be_left_out():
    cpu = receipt(CPU, device="this CPU")
    assert cpu.faults == ["62 products wider (lost speed): a CPU computes in float32"]
    assert not cpu
    with pytest.raises(DtypeError):
        cpu.require()
    cpu.require(device_limits=False)
    with pytest.raises(DtypeError, match="blocks/1/up"):
        receipt(CPU, WIDE, device="this CPU").require(device_limits=False)


def test_the_table_has_one_row_for_all_blocks():
    text = str(receipt(row("blocks/0/up"), row("blocks/1/up"), row("blocks/1/down"), row("head")))
    assert [line.split()[:1] for line in text.splitlines()[1:]] == [
        ["module"],
        ["blocks/*/up"],
        ["blocks/1/down"],
        ["head"],
    ]
    assert text.splitlines()[0] == "NVIDIA H200, asked: mixed_float16: float16 as asked in 4 of 4 products"
    assert "  2  as asked" in text.splitlines()[2]


def test_the_table_has_one_row_for_all_updates_that_are_as_asked():
    updates = [row(name, "float32", kind="update") for name in ("a", "b")]
    lines = str(receipt(*updates, row("c", "float16", "narrower", kind="update"))).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["*", "c"]


def test_json_has_every_row(tmp_path):
    found = receipt(row("blocks/0/up"), WIDE)
    found.to_json(tmp_path / "receipt.json")
    read = json.loads((tmp_path / "receipt.json").read_text())
    assert (read["device"], read["policy"], read["line"]) == ("NVIDIA H200", "mixed_float16", found.line)
    assert [(each["path"], each["verdict"]) for each in read["rows"]] == [
        ("blocks/0/up", "as asked"),
        ("blocks/1/up", "wider"),
    ]
    assert read["faults"] == found.faults


def test_a_notebook_shows_a_table():
    html = receipt(row("a<b"), WIDE)._repr_html_()
    assert ">a&lt;b</td>" in html
    assert "<p>blocks/1/up, forward product" in html


def test_a_receipt_without_products_says_so():
    assert receipt().line == "no products"
    assert receipt()


def small(flags):
    return f"--data.name synthetic:32x32x3:10 --data.batch_size 16 --data.crop_padding 0 {flags}"


STEPS = {
    "resnet": (small("--model.name resnet50 --model.width 8"), 2),
    "vit": (small("--model.name vit_b16 --model.width 64 --model.heads 4 --model.depth 2"), 1),
    "gpt2": (
        "--task language_modeling --data.name docstrings --data.length 64 --data.batch_size 8 --model.name gpt2 "
        "--model.depth 2 --model.width 64 --model.heads 4",
        2,
    ),
}


@functools.cache
def on_h200(name, policy):
    flags, devices = STEPS[name]
    config = load_config(f"{flags} --precision.policy {policy}".split())
    planned = planned_step(config, fields_of(config))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        program = start(pool, planned, "h200", devices=devices).result()
    target, modules = target_of_gpu(GPUS["h200"]), {"": planned.task.abstract}
    return receipt_of(program.executable, program.jaxpr, planned.plan.policy, target=target, modules=modules)


@pytest.mark.parametrize(
    ("name", "policy"), [("resnet", "mixed_bfloat16"), ("vit", "mixed_float16"), ("gpt2", "mixed_float16")]
)
def test_on_an_h200_every_product_sum_and_update_is_as_asked(plugin, name, policy):
    receipt = on_h200(name, policy)
    receipt.require()
    half = policy.removeprefix("mixed_")
    products = [row for row in receipt if row.kind in ("product", "convolution", "attention")]
    assert {(row.operands, row.accumulation) for row in products} == {(half, "float32")}
    count = sum(row.count for row in products)
    assert count == {"resnet": 161, "vit": 37, "gpt2": 35}[name]
    assert receipt.line == f"{half} as asked in {count} of {count} products"
    assert {row.direction for row in products} == {"forward", "backward"}
    sums = [row for row in receipt if row.kind == "reduction"]
    assert bool(sums) == (STEPS[name][1] > 1)
    assert {row.operands for row in sums} <= {"float32"}
    assert {row.operands for row in receipt if row.kind == "update"} == {"float32"}


def test_on_an_h200_products_of_one_input_run_as_one_and_attention_is_cudnns(plugin):
    receipt = on_h200("vit", "mixed_float16")
    by = {(row.path, row.direction): row for row in receipt}
    assert by["blocks/0/attention/key", "forward"].note == "in one product with blocks/0/attention/query"
    assert {row.by for row in receipt if row.kind == "attention"} == {"cuDNN"}
