"""Defines `Finding`: the verdict on a step, the operation where the fault begins, and the evidence."""

from typing import NamedTuple

from mpjax.diagnosis.readings import Site


class Finding(NamedTuple):
    """The verdict on a step, the operation where the fault begins, and the evidence.

    Attributes:
      verdict: "healthy", "overflow", "underflow", "rounding", "loss_scale" or "not_precision".
      site: the operation where the fault begins; None if healthy, or if no operation can be named.
      evidence: one paragraph with the numbers behind the verdict.
      better_scale: a loss scale with which the step is healthy; None if none was found or none is needed.
      accepts: the relative error of a gradient that a repair must reach, as in `Reference`; None uses the default
        limit.
      reason: for "not_precision" the failure in float32, in the words of the evidence; empty for other verdicts, and
        for an index out of range.
    """

    verdict: str
    site: Site | None
    evidence: str
    better_scale: float | None = None
    accepts: float | None = None
    reason: str = ""


def named(site: Site) -> str:
    """Describes a site in words, as in "add in layers/0 (forward, train.py:31)"."""
    return f"{site.operation} in {site.path or 'no module'} ({site.direction}, {site.source})"
