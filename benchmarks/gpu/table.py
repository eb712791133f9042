"""The table of a file of results, for docs/measured.md."""

from collections.abc import Mapping
from typing import Any


COLUMNS = (
    "network",
    "policy",
    "items/s",
    "memory",
    "of the roofline",
    "to float32",
    "PyTorch AMP",
    "to PyTorch",
    "to Flax linen",
    "loss scaling",
)


def table(results: Mapping[str, Any]) -> str:
    """Markdown: where and with what it was measured, a line for each policy of each case, then what has no number."""
    lines = [introduction(results), "", f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for case in results["cases"].values():
        policies = dict.fromkeys(row["policy"] for row in case["rows"].values())
        for policy in sorted(policies, key=("float32", "mixed_bfloat16", "mixed_float16").index):
            lines.append(f"| {' | '.join(_cells(case, policy))} |")
    missing = [f"- {title}, {', '.join(names)}: {error}" for (title, error), names in _errors(results).items()]
    return "\n".join([*lines, *(["", "Without a number:", "", *missing] if missing else [])]) + "\n"


def _errors(results: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    """By case and error the rows that it befell."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in results["cases"].values():
        for name, row in case["rows"].items():
            if "error" in row:
                found.setdefault((case["title"], row["error"]), []).append(name)
    return found


def introduction(results: Mapping[str, Any]) -> str:
    """Machine, versions, ceilings."""
    versions = dict(results["versions"])
    versions |= {"torch": results["torch"]["torch"]} if "torch" in results else {}
    driver = f", driver {results['driver']}" if results.get("driver") else ""
    ceilings = results["ceilings"]
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {policy}" for policy, rate in ceilings["matmul"].items())
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{results['device']}{driver}, Python {results['python']}, {named}, {results['date']}. "
        f"It reads and writes {ceilings['bandwidth'] / 1e12:.3g} TB/s and multiplies matrices at {rates}. Medians and "
        "quartiles of interleaved repeats; ratios are of speeds, above 1 where mpjax's, or half precision's, is higher."
    )


def _cells(case: Mapping[str, Any], policy: str) -> list[str]:
    own, torch = (case["rows"].get(f"{peer} {policy}", {}) for peer in ("mpjax", "torch"))
    found = case["ratios"]
    scaling = found.get("without to with loss scaling") if policy == "mixed_float16" else None
    return [
        case["title"],
        f"`{policy}`",
        _rate(own, case["unit"]),
        _memory(own),
        f"{own['roofline']['share']:.0%} ({own['roofline']['bound']})" if "roofline" in own else "-",
        _ratio(found.get(f"{policy} to float32")),
        _rate(torch, case["unit"]),
        _ratio(found.get(f"{policy} to PyTorch")),
        _ratio(found.get(f"{policy} to Flax linen")),
        f"{scaling['median'] - 1:+.1%} ({scaling['quartiles'][0] - 1:+.1%} to {scaling['quartiles'][1] - 1:+.1%})"
        if scaling
        else "-",
    ]


def _rate(row: Mapping[str, Any], unit: str) -> str:
    if "items_per_second" not in row:
        return "-"
    rate = row["items_per_second"]
    low, high = rate["quartiles"]
    eager = "" if row.get("facts", {}).get("compiled", True) else ", not compiled"
    return f"{rate['median']:,.0f} {unit}/s ({low:,.0f} to {high:,.0f}){eager}"


def _memory(row: Mapping[str, Any]) -> str:
    facts = row.get("facts", {})
    if size := facts.get("device_peak_bytes") or facts.get("program_bytes"):
        return f"{size / 1e9:.1f} GB"
    return "-"


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})"
