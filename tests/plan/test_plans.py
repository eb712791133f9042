"""The result of a plan: a dict, and a table in a notebook."""

import dataclasses
import json
import re

from mpjax.commands import Plans


def test_a_result_is_the_dict_that_json_prints():
    found = Plans({"model": "mlp", "plans": []}, ())
    assert json.loads(json.dumps(found)) == {"model": "mlp", "plans": []}


def test_a_notebook_shows_a_table_for_each_gpu_with_a_column_for_each_policy(plan_of):
    html = Plans({}, [plan_of(), plan_of("mixed_bfloat16")])._repr_html_()
    assert html.count("<table>") == 1
    assert re.findall(r"<th[^>]*>([^<]*)</th>", html) == ["per step and GPU", "float32", "mixed_bfloat16"]
    row = re.search(r"<tr><td[^>]*>  total at the peak</td>(.*?)</tr>", html)
    assert row
    assert re.findall(r">([^<]+)</td>", row[1]) == ["43.5 GB", "23.5 GB"]
    assert "NVIDIA H100 80GB HBM3: 100 examples a step over 4 GPUs" in html


def test_a_notebook_tells_meshes_apart(plan_of):
    plans = [dataclasses.replace(plan_of(), mesh={"data": 4 // size, "fsdp": size}) for size in (1, 2)]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", Plans({}, plans)._repr_html_())[1:] == [
        "float32 --mesh.data 4 --mesh.fsdp 1",
        "float32 --mesh.data 2 --mesh.fsdp 2",
    ]
