"""One training step: builds compiled pure functions of state and batch from model, optimizer and objective."""

from mpjax.training.eval_step import evaluate, make_eval_step
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh
from mpjax.training.objective import Mean
from mpjax.training.state import Structure, TrainState, create_state, take_apart
from mpjax.training.train_step import make_train_step


__all__ = [
    "Layout",
    "Mean",
    "Structure",
    "TrainState",
    "create_state",
    "evaluate",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "take_apart",
]
