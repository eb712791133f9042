"""The names of the axes of a mesh."""

DATA = "data"
"""The axis over which examples are divided, and parameters are whole."""

FSDP = "fsdp"
"""The axis over which examples and parameters are divided. Parameters are gathered for each block."""

TENSOR = "tensor"
"""The axis over which heads and hidden units are divided."""

BATCH_AXES = (DATA, FSDP)
"""The axes over which a batch is divided."""
