"""Runs training: the loop of steps, callbacks, checkpoints, interruption, and runs of several processes."""
