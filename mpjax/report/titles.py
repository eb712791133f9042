"""Names a run in the title of a figure by its model, data and policy, as its reader knows them."""

import pathlib

from mpjax.config import Config
from mpjax.config.user_code import names_code
from mpjax.report.history import History, changed_settings, turns_of


def title_of(config: Config, history: History = ()) -> str:
    """Returns the title of a run's figures.

    >>> title_of(Config())
    'resnet18 on digits, mixed_float16'
    >>> title_of(Config(), [{"step": 9, "changed": {"precision.policy": ["float32", "mixed_float16"]}}])
    'resnet18 on digits, float32 to step 9, then mixed_float16'

    Args:
      config: the settings of the run's last steps.
      history: the history of the run, if its settings may have changed.
    """
    rules = len(config.precision.rules)
    more = f" with {rules} rule{'s' if rules > 1 else ''}" if rules else ""
    changed = changed_settings(history)
    if turned := [step for step, text in turns_of(history).items() if "precision.rules." in text]:
        more += f" (other rules to step {turned[-1]:,})"
    return f"{subject_of(config)}, {changed.get('precision.policy', config.precision.policy)}{more}"


def subject_of(config: Config) -> str:
    """Returns the model and the data of a run, without the folders that they are in."""
    return f"{short_name(config.model.name)} on {short_name(config.data.name)}"


def short_name(spec: str) -> str:
    """Returns the last part of the name of a model or of data, if it is a path.

    >>> short_name("models/mine.py:Net"), short_name("folder:/data/flowers"), short_name("resnet18")
    ('Net', 'flowers', 'resnet18')
    """
    kind, _, where = spec.partition(":")
    if kind in ("folder", "hf"):
        return pathlib.PurePath(where).name or spec
    return spec.rpartition(":")[2].rpartition(".")[2] if names_code(spec) else spec
