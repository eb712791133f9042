"""Tokenizes texts and cuts them into examples."""
