"""Loggers of experiments, through their own packages: `--report.writers wandb`, `mlflow`, `comet`."""
