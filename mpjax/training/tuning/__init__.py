"""Finds the modules of a model that are faster in float32 than in half precision on the present device."""
