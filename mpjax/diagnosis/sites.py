"""The sites of readings: where in a program a result or a parameter stands."""

import numpy as np

from mpjax.diagnosis.pairs import Place
from mpjax.diagnosis.readings import Site
from mpjax.precision.casting.equations import NO_SOURCE, source_of


def site_of(eqn, var, place: Place) -> Site:
    """Returns the site of a result of an equation."""
    direction = "backward" if place.backward else "forward"
    source = source_of((eqn, *place.callers))
    return Site(place.path, direction, eqn.primitive.name, np.dtype(var.aval.dtype), tuple(var.aval.shape), source)


def parameter_site(path: str, direction: str, values) -> Site:
    """Returns the site of a parameter, its gradient or its update, with the shape and dtype of `values`."""
    return Site(path, direction, "parameter", np.dtype(values.dtype), tuple(values.shape), NO_SOURCE)
