"""Opens data sets by name, reads host batches from any position, and prepares batches on the device."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
