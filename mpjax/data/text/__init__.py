"""Texts: tokenizers, and blocks of tokens."""
