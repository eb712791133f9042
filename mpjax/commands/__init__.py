"""The commands, one page each: settings in, results out."""
