"""Data in, batches out: sources, streams and augmentation."""
