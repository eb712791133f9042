"""Where the first non-finite value comes from."""
