"""The training step of each framework, one file each: `start(task, dtype)` gives a function from a batch to metrics."""
