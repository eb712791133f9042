"""Judges a finite step in which neither overflow nor underflow is at fault: it is healthy, or rounding makes it wrong.

It is healthy with an error that does no harm, because the loss is near zero, and with rounding noise from all modules.
Otherwise a module is at fault: the one without whose rounding the step is right, or nearest to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpjax.diagnosis.finding import Finding, named
from mpjax.diagnosis.health import LOST, WITHOUT_ROUNDING, Reference, all_finite, loss_error, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Site
from mpjax.diagnosis.search import SUSPECTS, culprit, without_rounding_in
from mpjax.diagnosis.sums import noted_sum
from mpjax.diagnosis.trace import Trace, emulated


_NO_UNDERFLOW = "no gradient is lost to underflow"


def find_rounding(program: Program, trace: Trace, scale: float, reference: Reference) -> Finding:
    """Finds the module whose rounding makes a step wrong. The verdict is "healthy" if there is none.

    Args:
      program: the step.
      trace: the emulated run of the step.
      scale: the loss scale.
      reference: the float32 step to compare with.
    """
    if reference.has_loss(trace.low, scale):
        if (error := loss_error(trace.wide[0], trace.low[0])) > reference.tolerance:
            return _healthy(_near_zero(error, trace, scale, reference))
        evidence = f"The step is finite, its loss has a relative error of {error:.2g}, and {_NO_UNDERFLOW}."
        return _healthy(evidence + noted_sum(program, trace, scale, reference))
    errors = _errors_of(trace, scale, reference)
    alone = emulated(program, scale, isolated=True)
    ranked = _ranked(alone, errors, every=errors.lost and (errors.backward or reference.without_float8 is not None))
    own_error = alone.readings[ranked[0]].relative_error
    # If the float32 program has other operations, a module's own error does not cover all that it does differently.
    # Different random numbers are not a fault.
    differs = reference.program is not program and not program.is_random
    if errors.small and not differs and own_error <= reference.tolerance:
        return _healthy(
            f"The step is finite and {_NO_UNDERFLOW}. The loss has a relative error of {errors.loss:.2g}, which is "
            "rounding noise from all modules: with float32 inputs, no module has a relative error above "
            f"{own_error:.2g}."
        )
    suspect = _suspect(ranked, alone, errors, program, scale, reference)
    noise = errors.small and suspect.own_error <= reference.tolerance < suspect.left
    if noise and _is_right_without_rounding(program, scale, reference):
        return _healthy(_from_several(errors, suspect))
    evidence = _evidence(errors, suspect, program, trace, scale, reference)
    return Finding("rounding", suspect.site, evidence, accepts=reference.limit if errors.lost else None)


def _healthy(evidence: str) -> Finding:
    return Finding("healthy", None, evidence)


class _Errors(NamedTuple):
    """The relative errors of a step.

    Attributes:
      loss: the error of the loss.
      gradients: the error of each gradient.
      backward: True if the loss is right, so that the fault is in the derivative.
      lost: True if a gradient is wrong.
    """

    loss: float
    gradients: Sequence[float]
    backward: bool
    lost: bool

    @property
    def small(self) -> bool:
        """True if the errors may be rounding noise: at most half of the loss, and at most `LOST` for each gradient."""
        return self.loss <= 0.5 and max(self.gradients, default=0.0) <= LOST


def _errors_of(trace: Trace, scale: float, reference: Reference) -> _Errors:
    """Measures the errors of a step against the reference."""
    loss, gradients = loss_error(trace.wide[0], trace.low[0]), reference.per_gradient_errors(trace.low, scale)
    lost = max(gradients, default=0.0) > reference.limit
    return _Errors(loss, gradients, backward=loss <= reference.tolerance, lost=lost)


def _near_zero(error: float, trace: Trace, scale: float, reference: Reference) -> str:
    """Says why a loss near 0 may have a large relative error."""
    why = (
        f"terms with a total magnitude of {reference.terms:.2g} cancel in it"
        if reference.terms_cancel(trace.low, scale)
        else "float32 does not determine it either, because it changes with the last bits of the inputs"
    )
    return (
        f"The step is finite and {_NO_UNDERFLOW}. The loss has a relative error of {error:.2g} because it is near "
        f"zero: {why}. The gradients have a relative error of {reference.gradient_error(trace.low, scale):.2g}"
        + ("." if reference.determined(slice(1, None)) else ", and float32 does not determine them either.")
    )


def _ranked(alone: Trace, errors: _Errors, *, every: bool) -> list[int]:
    """The indices of the sites that may be at fault, the most suspicious first.

    Args:
      alone: the run in which each module gets float32 inputs.
      errors: the errors of the step.
      every: True for all sites: a layer whose results cancel afterwards may have accurate results and an inaccurate
        gradient. False for those of the forward pass.
    """
    decisive = [i for i, site in enumerate(alone.sites) if every or site.direction == "forward"]
    return sorted(decisive, key=lambda i: _blame(alone, i, errors.backward), reverse=True)


def _blame(alone: Trace, index: int, backward: bool) -> tuple[bool, float]:
    """The sort key of a suspicious site, larger for more suspicion: its own error, that is, with float32 inputs.

    With `backward`, sites of the backward pass with an error above `_NOTABLE` come first.
    """
    own_error = alone.readings[index].relative_error
    return backward and alone.sites[index].direction == "backward" and own_error > _NOTABLE, own_error


_NOTABLE = 0.05
"""The relative error above which a module's own backward pass is blamed before its forward pass."""


class _Suspect(NamedTuple):
    """The module without whose rounding the step is right, or nearest to it.

    Attributes:
      path: the module path.
      site: the operation with the largest error in it.
      own_error: the relative error of that operation's result with float32 inputs.
      left: how far the step without rounding in the module is from the reference, as in `Reference.fault`.
      among: the number of modules that may be at fault.
    """

    path: str
    site: Site
    own_error: float
    left: float
    among: int


def _suspect(
    ranked: Sequence[int], alone: Trace, errors: _Errors, program: Program, scale: float, reference: Reference
) -> _Suspect:
    """Finds the module to blame, by emulated runs without rounding in one module each.

    Args:
      ranked: the indices of the sites that may be at fault, the most suspicious first.
      alone: the run in which each module gets float32 inputs.
      errors: the errors of the step.
      program: the step.
      scale: the loss scale.
      reference: the float32 step to compare with.
    """
    # A result near zero has a large relative error, so the loss need not depend on the module with the largest error.
    worst = {alone.sites[i].path: i for i in reversed(ranked)}
    paths = sorted(worst, key=lambda path: _blame(alone, worst[path], errors.backward), reverse=True)
    left, path = culprit(paths, program, scale, reference)
    return _Suspect(path, alone.sites[worst[path]], alone.readings[worst[path]].relative_error, left, len(paths))


def _is_right_without_rounding(program: Program, scale: float, reference: Reference) -> bool:
    """True if the half-precision program is right when nothing is rounded, so that rounding is its only fault."""
    return reference.fault(outputs_of(WITHOUT_ROUNDING, program, scale), scale) <= reference.tolerance


def _from_several(errors: _Errors, suspect: _Suspect) -> str:
    """Describes rounding noise that no module causes alone."""
    gradient = f", a gradient one of {max(errors.gradients):.2g}" if errors.lost else ""
    return (
        f"The step is finite and {_NO_UNDERFLOW}. The loss has a relative error of {errors.loss:.2g}{gradient}. This "
        f"is rounding noise from several modules: of the {min(suspect.among, SUSPECTS)} most suspicious, none repairs "
        "the step alone, and the one that comes nearest has, with float32 inputs, a relative error of only "
        f"{suspect.own_error:.2g}."
    )


def _evidence(
    errors: _Errors, suspect: _Suspect, program: Program, trace: Trace, scale: float, reference: Reference
) -> str:
    """Says what is wrong, where most of the error comes from, and what is left without rounding there."""
    wrong = f"The loss has a relative error of {errors.loss:.2g}, although the step is finite and {_NO_UNDERFLOW}. "
    if errors.lost:
        parameter = program.parameter(int(np.argmax(errors.gradients)))
        gradient = f" gradient of {parameter} has one of {max(errors.gradients):.2g}. "
        finite = f"The step is finite and its loss has a relative error of {errors.loss:.2g}, but the"
        wrong = (finite if errors.backward else f"{wrong}The") + gradient
    origin = (
        f"Most of the error comes from {named(suspect.site)}: with float32 inputs, its result has a relative error of "
        f"{suspect.own_error:.2g}. Without rounding in its module, "
    )
    if errors.lost:
        both, tolerance = "both are" if suspect.left <= reference.tolerance else "not both are", reference.tolerance
        left = f"{both} within the tolerance: {tolerance:g} for the loss, and {reference.limit:g} for a gradient."
    elif all_finite(repaired := without_rounding_in(suspect.path, program, scale)):
        left = f"the loss has a relative error of {loss_error(trace.wide[0], repaired[0]):.2g}."
    else:
        left = "the step is not finite."
    return wrong + origin + left
