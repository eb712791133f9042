"""Many steps: the loop, checkpoints, interruption."""
