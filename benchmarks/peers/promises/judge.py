"""The sentences, decided by running a framework's loop; each gives a verdict and the numbers it rests on."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from peers.promises.loop import RATE, WEIGHT, NotOffered, Seen


BATCH = 8
GOOD, BAD = 0.28125, 1e5
"""Of x: a batch whose gradient is that, and one that is inf in float16 in the forward pass already."""

Problems = list[str]


def judge(framework: Any, sentence: str) -> dict:
    """`verdict` ("passes", "fails" or "not offered") and `evidence`, one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problems, facts = SENTENCES[sentence](framework)
    except NotOffered as error:
        return {"verdict": "not offered", "evidence": str(error)}
    return {"verdict": "fails" if problems else "passes", "evidence": "; ".join(problems or facts)}


def a1(framework: Any) -> tuple[Problems, list[str]]:
    """An overflow changes nothing but the scale, which halves, and the count of good steps, which starts anew."""
    loop = framework.start("norm", scale=1024.0, interval=100)
    loop.step(ramp(GOOD))
    before = loop.step(2 * ramp(GOOD))
    after = loop.step(full(BAD))
    problems = [
        f"{name} {_short(old)} -> {_short(after.state[name])}"
        for name, old in before.state.items()
        if not np.array_equal(old, after.state[name], equal_nan=True)
    ]
    if after.scale != before.scale / 2:
        problems.append(f"scale {before.scale:g} -> {after.scale:g}")
    if after.good_steps:
        problems.append(f"good steps {before.good_steps} -> {after.good_steps}")
    return problems, [f"{len(before.state)} arrays keep every bit ({', '.join(before.state)}), scale 1024 -> 512"]


def a2(framework: Any) -> tuple[Problems, list[str]]:
    """The scale doubles after exactly N good steps in a row, and the gradient of that step is the true one."""
    loop = framework.start("line", scale=1024.0, interval=3)
    wanted = [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]
    scales, wrong, weight = [], [], WEIGHT
    for number, x in enumerate([GOOD] * 4 + [BAD] + [GOOD] * 3, start=1):
        seen = loop.step(full(x))
        gradient, true = (weight - seen.weight) / RATE, 0.0 if x == BAD else x
        if not math.isclose(gradient, true, rel_tol=1e-3):
            wrong.append(f"step {number} applied {gradient:.4g} for a gradient of {true:.4g}")
        scales.append(int(seen.scale) if math.isfinite(seen.scale) else seen.scale)
        weight = seen.weight
    problems = [] if scales == wanted else [f"N=3, overflow at 5: scales {_list(scales)}, wanted {_list(wanted)}"]
    return problems + wrong, [f"N=3, overflow at step 5: scales {_list(scales)}; all gradients true"]


def a3(framework: Any) -> tuple[Problems, list[str]]:
    """The scale stays finite, within limits and a power of two; 40 overflows apply nothing; the floor is an error."""
    problems: Problems = []
    grown = _growing(framework)
    if odd := [scale for scale in grown if not _is_power_of_two(scale)]:
        problems.append(f"scale grows to {odd[-1]:.6g}")
    minimum = None
    try:
        loop, minimum = framework.start("line", scale=1024.0, interval=100, minimum=1.0), 1.0
    except NotOffered:
        loop = framework.start("line", scale=1024.0, interval=100)
    seen = [loop.step(full(BAD)) for _ in range(40)]
    if any(one.weight != WEIGHT for one in seen):
        problems.append(f"40 overflows: weight {WEIGHT} -> {seen[-1].weight}")
    if minimum is None:
        problems.append(f"no smallest scale to set: {seen[-1].scale:.3g} after 40 overflows")
    elif seen[-1].scale != minimum:
        problems.append(f"scale {seen[-1].scale:.3g} after 40 overflows with a minimum of 1")
    said = framework.stopped_at_floor()
    if said is None:
        problems.append("steps that overflow at the smallest scale go on in silence")
    facts = f"scales up to {max(grown):.3g} and down to {seen[-1].scale:g}, 40 overflows apply nothing"
    return problems, [facts, str(said)]


def a7(framework: Any) -> tuple[Problems, list[str]]:
    """k micro-batches are one batch k times as large; an inf in any discards all of them, and backs off once."""
    parts = [full(x) for x in (0.25, 0.5, 0.125, 0.375)]
    loop = framework.start("line", scale=1024.0, interval=100, accumulate=4)
    seen = [loop.step(x) for x in parts]
    large = framework.start("line", scale=1024.0, interval=100).step(np.concatenate(parts)).weight
    problems: Problems = []
    if not math.isclose(seen[-1].weight, large, rel_tol=1e-6):
        problems.append(f"4 micro-batches: weight {seen[-1].weight:.6g}, one batch: {large:.6g}")
    spoilt = [loop.step(x) for x in (parts[0], full(BAD), parts[2], parts[3])]
    scales = [one.scale for one in (*spoilt[:-1], spoilt[-1])]
    if spoilt[-1].weight != seen[-1].weight:
        problems.append(f"overflow in micro-batch 2 of 4: weight {seen[-1].weight:.6g} -> {spoilt[-1].weight:.6g}")
    if scales[:-1] != [1024.0] * 3 or scales[-1] != 512.0:
        problems.append(f"overflow in micro-batch 2 of 4: scales {_list(scales)}, wanted 1024, 1024, 1024, 512")
    last = [loop.step(x) for x in parts][-1].weight
    change = seen[-1].weight - WEIGHT
    if not math.isclose(last - spoilt[-1].weight, change, rel_tol=1e-5):
        problems.append(f"the next window moved the weight by {last - spoilt[-1].weight:.6g}, not {change:.6g}")
    return problems, [f"4 micro-batches = one batch ({large:.6g}); overflow in 2nd: scales {_list(scales)}, no update"]


def a10(framework: Any) -> tuple[Problems, list[str]]:
    """A float16 loss under the default scale: no step is lost for it, losses are float32 and true, one program."""
    loop = framework.start("line", half_loss=True)
    batches, weight, problems, seen = [GOOD, GOOD, 512.0, GOOD, GOOD], WEIGHT, [], []
    for number, x in enumerate(batches, start=1):
        now: Seen = loop.step(full(x))
        if not math.isclose(now.loss, weight * x, rel_tol=2e-3):
            problems.append(f"step {number} reports a loss of {now.loss:.4g}, wanted {weight * x:.4g}")
        if number == 1 and now.weight == weight:
            problems.append("the first step is lost")
        weight = now.weight
        seen.append(now)
    if dtypes := {one.loss_dtype for one in seen} - {"float32"}:
        problems.append(f"the loss is reported in {', '.join(dtypes)}")
    if (programs := seen[-1].programs) not in (None, 1):
        problems.append(f"compiled {programs} times")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lost = framework.start("line", scale=2.0**16, half_loss=True).step(full(GOOD)).weight == WEIGHT
    told = [one for one in told if "float16" in str(one.message)]
    if lost and not told:
        problems.append("under a scale of 2^16 steps are lost in silence")
    losses = _list([one.loss for one in seen])
    note = "told of 2^16" if told else "2^16 loses none"
    return problems, [f"losses {losses}, float32; programs: {'eager' if programs is None else programs}; {note}"]


def a11(framework: Any) -> tuple[Problems, list[str]]:
    """float16 gradients are unscaled and their norm is summed in float32."""
    one = float(framework.unscaled(np.array([1e-3], np.float16), 65536.0)[0])
    norm = framework.norm_of(np.full(10, 300.0, np.float16))
    problems = []
    if not math.isclose(one, float(np.float16(1e-3)) / 65536, rel_tol=1e-5):
        problems.append(f"1e-3 / 65536 becomes {one:.4g}")
    if not math.isclose(norm, 300 * math.sqrt(10), rel_tol=1e-4):
        problems.append(f"ten values of 300 have norm {norm:.6g}")
    return problems, [f"1e-3 / 65536 becomes {one:.4g}; ten values of 300 have norm {norm:.1f}"]


def a20(framework: Any) -> tuple[Problems, list[str]]:
    """Batch norm in float16: statistics and evaluation as in float32, its scale and bias not rounded to half."""
    problems: Problems = []
    x = (200 * np.random.default_rng(0).standard_normal((2, 224, 224)) + 200).astype(np.float16)
    _, mean, var = framework.batch_norm(x, 0.0, 1.0, 1.0, 0.0, epsilon=1e-5, train=True)
    wide = x.astype(np.float64)
    for name, found, true in (("mean", mean, 0.5 * wide.mean()), ("variance", var, 0.5 + 0.5 * wide.var())):
        if not abs(found / true - 1) < 1e-3:
            problems.append(f"running {name} {found:.6g}, in float32 {true:.6g}")
    for var, value in ((112500.0, 300.0), (1.25e-8, 1e-4)):
        y = framework.batch_norm(np.full((1, 1, 1), value), 0.0, var, 1.0, 0.0, epsilon=1e-8, train=False)[0]
        true = float(np.float16(value)) / math.sqrt(var + 1e-8)
        if not math.isclose(float(y.ravel()[0]), true, rel_tol=2e-3):
            problems.append(f"evaluation with variance {var:g} gives {float(y.ravel()[0]):.4g}, wanted {true:.4g}")
    # 1.0004 is 1 in float16: then 1 * scale - 1 is 0.
    y = framework.batch_norm(np.ones((1, 1, 1)), 0.0, 1.0, 1.0004, -1.0, epsilon=0.0, train=False)[0]
    left = float(y.ravel()[0])
    if not math.isclose(left, 4e-4, rel_tol=0.02):
        problems.append(f"a scale of 1.0004 acts as {1 + left:.6g}")
    return problems, ["statistics within 1e-3, evaluation right at variances 112500 and 1.25e-8, scale 1.0004 kept"]


SENTENCES: dict[str, Callable[[Any], tuple[Problems, list[str]]]] = {
    "A1": a1,
    "A2": a2,
    "A3": a3,
    "A7": a7,
    "A10": a10,
    "A11": a11,
    "A20": a20,
}


def full(value: float) -> np.ndarray:
    return np.full(BATCH, value, np.float32)


def ramp(mean: float) -> np.ndarray:
    return np.linspace(0, 2 * mean, BATCH, dtype=np.float32)


def _growing(framework: Any) -> list[float]:
    """Scales on the way up: from 2^10, and in float32 from 2^126, with a factor of 16 where it can be set."""
    loop = framework.start("line", scale=1024.0, interval=1)
    scales = [loop.step(full(0.0)).scale for _ in range(20)]
    try:
        loop = framework.start("wide", scale=2.0**126, interval=1, factor=16.0)
    except NotOffered:
        loop = framework.start("wide", scale=2.0**126, interval=1)
    return scales + [loop.step(full(0.0)).scale for _ in range(5)]


def _is_power_of_two(value: float) -> bool:
    return math.isfinite(value) and math.frexp(value)[0] == 0.5


def _short(value: np.ndarray) -> str:
    return f"{float(np.ravel(value)[0]):.4g}"


def _list(values: list) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
