"""Which modules of a model are faster in float32 than in half precision, on the device at hand."""
