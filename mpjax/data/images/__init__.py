"""Decoding of images and masks on the host."""
