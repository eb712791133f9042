"""One step: a model, an optimizer and an objective in, pure compiled functions of state and batch out."""

from mpjax.training.eval_step import evaluate, make_eval_step
from mpjax.training.state import Structure, TrainState, create_state, take_apart
from mpjax.training.train_step import make_train_step


__all__ = [
    "Structure",
    "TrainState",
    "create_state",
    "evaluate",
    "make_eval_step",
    "make_train_step",
    "take_apart",
]
