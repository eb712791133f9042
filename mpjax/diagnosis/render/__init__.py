"""A diagnosis as text and as an HTML page."""
