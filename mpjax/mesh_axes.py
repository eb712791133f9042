"""The names of the axes of a mesh."""

DATA = "data"
"""The axis that divides examples and replicates parameters."""

FSDP = "fsdp"
"""The axis that divides examples and parameters. Parameters are gathered for each block."""

TENSOR = "tensor"
"""The axis that divides attention heads and hidden units."""

BATCH_AXES = (DATA, FSDP)
"""The axes that divide a batch."""
