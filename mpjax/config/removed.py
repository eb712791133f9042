"""The settings that only earlier versions had, whose runs stored every setting, and what to write in their place."""

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A setting of earlier versions.

    Attributes:
      default: its default as a TOML value. A stored run with this value is read as if it lacked the setting.
      instead: what to write for any other value, which is an error.
    """

    default: Any
    instead: str


_MUON = "--optimizer.name examples/airbench.py:muon_and_sgd (a file of mpjax's repository), which has it as an argument"

REMOVED = {
    "data.test_time_augmentation": Removed(
        "none", "a model of several views, such as --model.name examples/airbench.py:Airbench of mpjax's repository"
    ),
    "optimizer.normalise_filters": Removed(False, f"{_MUON}, `normalise`"),
    "optimizer.rest_learning_rate": Removed(0.0, _MUON),
    "optimizer.rest_momentum": Removed(0.9, _MUON),
    "precision.tune": Removed(
        False, "--precision.rules with the rules that examples/tune_products.py of mpjax's repository prints"
    ),
}
"""The removed settings, by name."""
