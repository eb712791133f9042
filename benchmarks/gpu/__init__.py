"""mpjax on one GPU beside its peers: what `benchmarks/gpu.py` runs, one question per file."""
