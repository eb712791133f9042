"""From the name of a task to its objective."""

import functools

from mpjax.config import Config
from mpjax.data import Fields, prepare
from mpjax.precision.casting import full_precision
from mpjax.precision.policy import Policy
from mpjax.training.objectives.classification import classification
from mpjax.training.objectives.language_modeling import language_modeling
from mpjax.training.objectives.objective import Objective
from mpjax.training.objectives.segmentation import segmentation
from mpjax.training.objectives.text_classification import text_classification


def objective_of(config: Config, policy: Policy, fields: Fields) -> Objective:
    """What `config.task` trains and measures on batches of these fields; `policy` casts the images."""
    smoothing = config.training.label_smoothing
    # Pixels are no activations: under autocast too, what augments them computes as it is written.
    prepared = full_precision(functools.partial(prepare, config=config.data, fields=fields))
    if config.task == "segmentation":
        return segmentation(prepared, policy)
    if config.task == "text_classification":
        return text_classification(label_smoothing=smoothing)
    if config.task == "language_modeling":
        return language_modeling(label_smoothing=smoothing)
    return classification(prepared, policy, label_smoothing=smoothing)
