"""Experiment loggers, through their own packages: `--report.writers wandb`, `mlflow`, `comet`."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
