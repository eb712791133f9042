"""The layouts of files of weights, one file for each family of models."""
