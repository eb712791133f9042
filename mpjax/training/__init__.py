"""One step: state, losses, optimizer, and the pure train and eval steps."""
