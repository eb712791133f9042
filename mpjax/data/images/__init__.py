"""Images and masks on the host."""
