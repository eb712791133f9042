"""The public names as type checkers and editors see them; `__init__.py` imports each on first use."""
# ruff: noqa: I001 (in the order of `__all__`)

# What a user starts with.
from mpjax.precision.policy import Policy as Policy
from mpjax.precision.presets import get_policy as get_policy
from mpjax.precision.modules import apply_policy as apply_policy
from mpjax.precision.casting.transform import autocast as autocast
from mpjax.precision.casting.transform import full_precision as full_precision
from mpjax.precision.loss_scale import dynamic_loss_scaling as dynamic_loss_scaling
from mpjax.precision.loss_scale import static_loss_scaling as static_loss_scaling
from mpjax.precision.loss_scale import no_loss_scaling as no_loss_scaling
from mpjax.precision.scaled_loss import scaled_value_and_grad as scaled_value_and_grad
from mpjax.precision.scale_state import where_finite as where_finite
from mpjax.precision.master import master_weights as master_weights
from mpjax.precision.reduction import reduce_gradients as reduce_gradients
from mpjax.diagnosis.one_step import diagnose as diagnose
from mpjax.plan.receipt_of_function import receipt as receipt
from mpjax.commands.train import run as run
from mpjax.config.schema import Config as Config
from mpjax.extend import Callback as Callback
from mpjax.models.pretrained.load import load_pretrained as load_pretrained
from mpjax.training.train_step import make_train_step as make_train_step
from mpjax.training.state import create_state as create_state
from mpjax.training.state import TrainState as TrainState
from mpjax.errors import UsageError as UsageError
from mpjax.errors import Diverged as Diverged

# Dtypes of a program.
from mpjax.precision.dtype_audit import audit as audit
from mpjax.precision.dtypes import check_dtypes as check_dtypes

# Loss scaling by hand.
from mpjax.precision.scaled_loss import scale_loss as scale_loss
from mpjax.precision.scale_state import loss_scale_state as loss_scale_state
from mpjax.precision.scale_state import LossScaleState as LossScaleState

# Runs and training steps.
from mpjax.config.durations import Duration as Duration
from mpjax.training.state import take_apart as take_apart
from mpjax.training.eval_step import make_eval_step as make_eval_step
from mpjax.training.objective import Mean as Mean

# Results.
from mpjax.diagnosis.one_step import diagnose_function as diagnose_function
from mpjax.diagnosis.diagnosis import Diagnosis as Diagnosis
from mpjax.diagnosis.log_ratios import mismatch as mismatch
from mpjax.diagnosis.log_ratios import Mismatch as Mismatch
from mpjax.plan.receipt import Receipt as Receipt

# What a callback is called with.
from mpjax.extend import RunInfo as RunInfo

# Errors and warnings.
from mpjax.errors import CallbackError as CallbackError
from mpjax.errors import DtypeError as DtypeError
from mpjax.errors import Interrupted as Interrupted
from mpjax.errors import CheckpointWarning as CheckpointWarning
from mpjax.errors import DataWarning as DataWarning
from mpjax.errors import LoggerWarning as LoggerWarning
from mpjax.errors import PrecisionWarning as PrecisionWarning

# Submodules.
from mpjax import config as config
from mpjax import data as data
from mpjax import diagnosis as diagnosis
from mpjax import loop as loop
from mpjax import models as models
from mpjax import plan as plan
from mpjax import precision as precision
from mpjax import report as report
from mpjax import training as training

__version__: str
