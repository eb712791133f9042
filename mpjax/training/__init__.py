"""One training step: builds compiled pure functions of state and batch from model, optimizer and objective."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
