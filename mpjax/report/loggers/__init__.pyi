"""What `mpjax.report.loggers` offers."""

from mpjax.report.loggers.background import InBackground as InBackground
from mpjax.report.loggers.background import Logger as Logger
from mpjax.report.loggers.background import require_package as require_package
from mpjax.report.loggers.weights_and_biases import open_wandb as open_wandb
