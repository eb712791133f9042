"""Decodes images and masks on the host."""
