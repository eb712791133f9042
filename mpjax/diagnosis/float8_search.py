"""Searches for the layers of a step that can multiply in float8 within a tolerance of float32."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.core import Tracer

from mpjax.diagnosis.arithmetic import as_float32
from mpjax.diagnosis.block_formats import MXFP8, NVFP4, sqnr_in_blocks
from mpjax.diagnosis.emulate import Emulator, nowhere
from mpjax.diagnosis.formats import FLOAT8
from mpjax.diagnosis.health import ROUNDING, Reference, is_repaired, loss_error, outputs_of
from mpjax.diagnosis.one_step import without_float8
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.render.text import percent
from mpjax.diagnosis.search import first_enough, flags_of, minimal, pattern_of, with_rules
from mpjax.diagnosis.trace import Trace, decibels, emulated
from mpjax.errors import PrecisionWarning, UsageError
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


PRESET = "mixed_float8"


class QuantisedLayer(NamedTuple):
    """A layer whose matrix products are in float8 under the preset `mixed_float8`.

    Attributes:
      path: the module path.
      float8: True if it stays in float8.
      sqnr: the signal-to-quantisation-noise ratio of the noisiest operand, forward or backward, in decibels.
      underflow: the fraction of values that underflow to zero, in the operand with most of them. `sqnr` does not show
        it if one outlier has most of the signal.
      sqnr_mxfp8: the same ratio in MX blocks; None if it was not measured, as for a product in a loop.
      sqnr_nvfp4: the same ratio in NVFP4 blocks; None if it was not measured.
    """

    path: str
    float8: bool
    sqnr: float
    underflow: float
    sqnr_mxfp8: float | None
    sqnr_nvfp4: float | None


@dataclasses.dataclass(frozen=True)
class Float8Layers:
    """The layers that can multiply in float8.

    Attributes:
      layers: the layers in float8 under the preset: first those whose underflow exceeds the tolerance, most underflow
        first; then the others, the noisiest first.
      rules: the rules to add to the preset, from module path to the compute dtype, for layers that cannot be in float8.
      within: True if the step with these rules is within the tolerance; False if no layer can be in float8.
      float8_flops: the fraction of the FLOPs of matrix products, convolutions and fused attention in layers that stay
        in float8.
      loss_error: the relative error of the loss with these rules; 0 if no layer can be in float8.
      gradient_error: the relative error of all gradients together, in the Euclidean norm; 0 if no layer can be in
        float8.
      reason: the reason why no layer is in float8; empty if a layer is.
    """

    layers: tuple[QuantisedLayer, ...] = ()
    rules: dict[str, str] = dataclasses.field(default_factory=dict)
    within: bool = False
    float8_flops: float = 0.0
    loss_error: float = 0.0
    gradient_error: float = 0.0
    reason: str = ""

    @property
    def flags(self) -> str:
        """The preset and its rules as flags of train.py."""
        return f"--precision.policy {PRESET} {flags_of(self.rules)}".rstrip()

    def __str__(self) -> str:
        if not self.layers:
            return f"float8: no layer. {self.reason}"
        kept = sum(layer.float8 for layer in self.layers)
        lines = [f"float8: {kept} of {len(self.layers)} layers" + (f": {self.flags}" if self.within else "")]
        if self.within:
            errors = f"loss error {self.loss_error:.2g}, gradient error {self.gradient_error:.2g}"
            lines.append(f"  {errors}, {self.float8_flops:.1%} of the FLOPs in float8; plan.py says if it is faster")
        else:
            lines.append(f"  {self.reason}")
        width = max(len("layer"), *(len(layer.path) for layer in self.layers))
        lines.append(f"  SQNR dB  {'layer':<{width}}  float8  {MXFP8}  {NVFP4}  underflow %")
        for layer in self.layers:
            noise = map(_decibels, (layer.sqnr, layer.sqnr_mxfp8, layer.sqnr_nvfp4))
            cells = "  ".join(f"{text:>{space}}" for text, space in zip(noise, (6, 5, 5), strict=True))
            answer = "yes" if layer.float8 else "no "
            lines.append(f"  {answer}      {layer.path:<{width}}  {cells}  {percent(layer.underflow):>11}")
        return "\n".join(lines)


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def float8_layers(make: Callable[[Policy], Program], reference: Reference) -> Float8Layers:
    """Searches for the layers that can multiply in float8, under `mixed_float8` with rules for the other layers.

    If the step with all layers in float8 is not right (`is_repaired`), the search takes layers out of float8, in
    numbers that double, until the step is right. Layers whose underflow exceeds the tolerance are taken out first, most
    underflow first; then the noisiest. It then puts back every layer that need not be out. Each set is tried on the
    step traced under its rules, with a loss scale of 1.

    If even one layer alone is not right, `within` is False, the rules take all layers out, and `reason` says so. If the
    model has no suitable layer, the result is empty but for `reason`; no error is raised.

    Args:
      make: a function from policy to the step's program.
      reference: the float32 step to compare with, and its tolerance.
    """
    policy = get_policy(PRESET)
    try:
        with warnings.catch_warnings():  # autocast warns if no product is in float8; the result has a reason
            warnings.simplefilter("ignore", PrecisionWarning)
            program = make(policy)
    except UsageError as error:  # no layer of the model is suitable; the message names the rules
        return Float8Layers(reason=str(error))
    judge = dataclasses.replace(reference, without_float8=functools.partial(without_float8, make, policy, 1.0))
    noise = _noise(emulated(program, 1.0))
    if not noise:
        return Float8Layers(reason="No product of the step is one of a linear layer with sides of at least 64.")
    ranked, compute = (
        sorted(noise, key=lambda path: _order(*noise[path], reference.tolerance)),
        str(policy.compute_dtype),
    )

    def rules_for(out: Sequence[str]) -> dict[str, str]:
        return {pattern_of(path): compute for path in out}

    def repairs(out: Sequence[str]) -> bool:
        return is_repaired(judge, make(with_rules(policy, rules_for(out))), 1.0)

    out: Sequence[str] | None = []
    if not is_repaired(judge, program, 1.0):
        out = first_enough(ranked[:-1], repairs)  # at least one layer stays in float8
        out = None if out is None else minimal(out, repairs)
    blocks = noise_in_blocks(program)
    layers = tuple(
        QuantisedLayer(
            path, out is not None and path not in out, *noise[path], *map(blocks.get(path, {}).get, ("mxfp8", "nvfp4"))
        )
        for path in ranked
    )
    if out is None:
        reason = f"With {ranked[-1]} alone in float8, the step is not within {reference.tolerance:g} either."
        return Float8Layers(layers, rules_for(ranked), reason=reason)
    final = make(with_rules(policy, rules_for(out)))
    low, flops = outputs_of(ROUNDING, final, 1.0), final.flops()
    return Float8Layers(
        layers=layers,
        rules=rules_for([path for path in ranked if path in out]),
        within=True,
        float8_flops=sum(flops.get(layer.path, 0) for layer in layers if layer.float8) / max(sum(flops.values()), 1),
        loss_error=loss_error(reference.outputs[0], low[0]),
        gradient_error=reference.gradient_error(low, 1.0),
    )


def _noise(trace: Trace) -> dict[str, tuple[float, float]]:
    """Measures the noise of values rounded to float8, as a pair by module path.

    The pair is the least signal-to-quantisation-noise ratio in decibels and the largest fraction of underflow.
    """
    noise: dict[str, tuple[float, float]] = {}
    for site, reading in zip(trace.sites, trace.readings, strict=True):
        if site.dtype in FLOAT8 and reading.exact:
            sqnr, underflow = noise.get(site.path, (200.0, 0.0))
            noise[site.path] = min(sqnr, decibels(reading)), max(underflow, reading.underflow / reading.size)
    return noise


def _order(sqnr: float, underflow: float, tolerance: float) -> tuple[float, float]:
    """The sort key of a layer: layers with much underflow first, then those with the least `sqnr` in decibels."""
    return -underflow if underflow > tolerance else 0.0, sqnr


FORMATS = (MXFP8, NVFP4)


def noise_in_blocks(program: Program) -> dict[str, dict[str, float]]:
    """Measures the signal-to-quantisation-noise ratio in block formats, by module path and format.

    The result is in decibels: `{"layers/0": {"mxfp8": 31.2, "nvfp4": 19.5}}`. The noisiest operand of a module's
    products, forward and backward, determines the ratio. Of an operand with inf or NaN, it is NaN. Blocks lie along the
    contracted axis. Products in a loop are skipped, because their operands are unknown before the loop runs.

    Args:
      program: a step with products in float8. Its operands are measured without rounding.
    """
    sqnrs: dict[str, dict[str, float]] = {}
    Listening(sqnrs_by_module=sqnrs).run(*program.at(1.0))
    return sqnrs


@dataclasses.dataclass(frozen=True)
class Listening(Emulator):
    """An emulator without rounding that measures the operands of products in float8.

    Attributes:
      sqnrs_by_module: the signal-to-quantisation-noise ratio of the noisiest operand, in decibels, by module path and
        name of a format. A run fills it.
    """

    rounds: Callable[[str], bool] = nowhere
    reference: bool = False
    sqnrs_by_module: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an equation. If it is a product in float8, measures its operands first."""
        if eqn.primitive.name == "dot_general" and any(var.aval.dtype in FLOAT8 for var in eqn.invars):
            for pair, axes in zip(pairs, eqn.params["dimension_numbers"][0], strict=True):
                if not isinstance(pair.low, Tracer):
                    self._listen(place.path, np.asarray(as_float32(pair.low)), tuple(axes))
        return super().applied(eqn, pairs, place, debug_info)

    def _listen(self, path: str, values: np.ndarray, axes: tuple[int, ...]) -> None:
        """Measures an operand of a product in module `path`, with blocks along the contracted `axes`."""
        last = tuple(range(values.ndim - len(axes), values.ndim))
        rows = np.moveaxis(values, axes, last).reshape(*np.delete(values.shape, axes), -1)
        sqnrs = self.sqnrs_by_module.setdefault(path, {})
        for block_format in FORMATS:
            least = sqnrs.get(str(block_format), 200.0)
            sqnrs[str(block_format)] = float(np.minimum(least, sqnr_in_blocks(rows, block_format)))  # NaN stays NaN
