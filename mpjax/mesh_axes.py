"""The names of the axes of a mesh."""

DATA = "data"
"""The axis that divides examples and replicates parameters."""

FSDP = "fsdp"
"""The axis that divides examples and parameters. Parameters are gathered for each block."""

CONTEXT = "context"
"""The axis that divides the positions of texts, and parameters as `FSDP` does."""

TENSOR = "tensor"
"""The axis that divides attention heads and hidden units."""

BATCH_AXES = (DATA, FSDP)
"""The axes that divide the examples of a batch."""

LOSS_AXES = (DATA, FSDP, CONTEXT)
"""The axes over which losses and gradients are summed: their devices compute different examples or positions."""

PARAMETER_AXES = (FSDP, CONTEXT)
"""The axes that divide parameters together."""
