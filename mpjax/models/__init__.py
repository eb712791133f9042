"""Networks in Flax NNX, plain enough to read as a tutorial."""
