"""The table of a step on more GPUs."""

import dataclasses

from mpjax.commands import scaling_rows, scaling_table, scaling_title


def test_each_number_of_gpus_has_the_time_and_efficiency_of_each_policy(plan_of):
    plans = [plan_of(), plan_of("mixed_bfloat16")]
    assert scaling_rows(plans) == [("1", ["8 ms 100.0%", "8 ms 100.0%"]), ("8", ["10 ms  80.0%", "10 ms  80.0%"])]
    assert [column.header for column in scaling_table(plans).columns] == ["GPUs", "float32", "mixed_bfloat16"]


def test_the_title_says_what_is_kept_what_grows_and_what_the_links_are(plan_of):
    assert scaling_title([plan_of()]) == (
        "expected step and efficiency, 25 examples on each GPU, --mesh.data grows\n"
        "links within a host of 8: 450 GB/s per GPU; between hosts: 50 GB/s per GPU"
    )
    assert scaling_title([plan_of(gpu="l4")]).endswith("8: 32 GB/s per GPU; between hosts: not known")


def test_an_axis_of_one_device_says_nothing_of_more(plan_of):
    plan = plan_of()
    alone = dataclasses.replace(plan, communication=dataclasses.replace(plan.communication, scaling=[]))
    wanted = "--mesh.data is 1, so the program says nothing of more GPUs: for scaling, plan --devices 8"
    assert scaling_title([alone]) == wanted
