"""Renders a diagnosis as text and as an HTML page."""
