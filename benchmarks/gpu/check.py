"""Whether a step computes what it should: its loss, gradient and update against those of full float32."""

from collections.abc import Mapping

from gpu.cases import Row


ROUNDOFF = {"float32": 2.0**-10, "mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
"""The largest relative error of one rounding: TF32 has float16's 10 bits, and may cut off what float16 rounds."""

LOSS, GRADIENT = 4, 16
"""How many roundings off a loss, or a gradient's norm, may be that is the outcome of many of them."""

UPDATE = 0.5
"""How far off, relatively, the decrease of the loss by one update may be; without the update it would be off by 1."""


def disagreement(found: Mapping[str, float], reference: Mapping[str, float], row: Row) -> str | None:
    """What differs by more than the policy's rounding explains; None where nothing does.

    Args:
      found: of the first applied step `loss` and `grad_norm` (left out by loops that do not compute it), and
        `second_loss`, of the same batch after it.
      reference: the same of a step in float32 throughout, without TF32.
      row: whose policy rounds.
    """
    roundoff = ROUNDOFF[row.policy]
    allowed = {"loss": LOSS * roundoff}
    # Without loss scaling a float16 gradient has lost what was too small: that is what scaling is for.
    if row.policy != "mixed_float16" or row.dynamic:
        allowed |= {"grad_norm": GRADIENT * roundoff, "decrease": UPDATE}
    found, reference = _with_decrease(found), _with_decrease(reference)
    for name, most in allowed.items():
        if name in found:
            off = abs(found[name] - reference[name]) / abs(reference[name])
            if not off <= most:  # NaN is not
                wanted = f"in float32 {reference[name]:.6g}: off by {off:.2g}, allowed {most:.2g}"
                return f"{name} {found[name]:.6g}, {wanted}"
    return None


def _with_decrease(first: Mapping[str, float]) -> dict[str, float]:
    return {**first, "decrease": first["loss"] - first["second_loss"]}
