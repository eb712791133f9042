"""The sources of examples, one file for each kind of data set."""
