"""The commands: each maps settings to results."""
