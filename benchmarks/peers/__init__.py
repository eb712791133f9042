"""mpjax and the frameworks that one would take instead, on the same models and batches."""
