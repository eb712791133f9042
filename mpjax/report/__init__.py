"""What a run leaves behind: console, files, plots."""
