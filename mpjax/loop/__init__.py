"""The training loop: steps, checkpoints and interruption."""
