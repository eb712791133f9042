"""What follows from measured times: items per second, shares of the roofline, ratios between rows."""

from collections.abc import Mapping
from typing import Any

from gpu.cases import Case, Row
from gpu.spread import ratios, spread


POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def conclusions(case: Case, record: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, Any]:
    """A case's record with what follows from it: a row's `items_per_second` and `roofline`, and the case's `ratios`.

    Args:
      case: what was measured.
      record: `rows` by name, each with `seconds` (a number per round, in which all rows took their turn) and `alone`
        (before the rounds); `flops` of a step.
      ceilings: of the device.
    """
    rows = {name: {**row, **_of_row(case, row, record, ceilings)} for name, row in record["rows"].items()}
    return {**record, "rows": rows, "ratios": _ratios(record["rows"])}


def _of_row(
    case: Case, row: Mapping[str, Any], record: Mapping[str, Any], ceilings: Mapping[str, Any]
) -> dict[str, Any]:
    seconds = row.get("seconds") or ([row["alone"]] if "alone" in row else [])
    if not seconds or "error" in row:
        return {}
    found = spread(seconds)
    low, high = found["quartiles"]
    rate = {"median": case.items / found["median"], "quartiles": [case.items / high, case.items / low]}
    concluded: dict[str, Any] = {"seconds_per_step": found, "items_per_second": rate}
    if ceilings and "flops" in record and "traffic_bytes" in row.get("facts", {}):
        compute = record["flops"] / ceilings["matmul"][row["policy"]]
        moving = row["facts"]["traffic_bytes"] / ceilings["bandwidth"]
        concluded["roofline"] = {
            "compute_seconds": compute,
            "traffic_seconds": moving,
            "bound": "compute" if compute > moving else "traffic",
            "share": max(compute, moving) / found["median"],
        }
    return concluded


def _ratios(rows: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as fast the first is as the second, from rounds in which both took their turn."""
    pairs = {}
    for policy in POLICIES:
        own = Row(peer="mpjax", policy=policy)
        pairs[f"{policy} to PyTorch"] = own, Row(peer="torch", policy=policy)
        pairs[f"{policy} to Flax linen"] = own, Row(peer="linen", policy=policy)
        pairs[f"{policy} to float32"] = own, Row(peer="mpjax", policy="float32")
    unscaled = Row(peer="mpjax", policy="mixed_float16", scaling="none")
    pairs["without to with loss scaling"] = unscaled, Row(peer="mpjax", policy="mixed_float16")
    found = {}
    for name, (first, second) in pairs.items():
        times = [rows.get(str(row), {}) for row in (first, second)]
        if first != second and all(row.get("seconds") and "error" not in row for row in times):
            found[name] = ratios(times[1]["seconds"], times[0]["seconds"])
    return found
