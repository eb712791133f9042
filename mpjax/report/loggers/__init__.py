"""Experiment loggers, through their own packages: `--report.writers wandb`, `mlflow`, `comet`."""
