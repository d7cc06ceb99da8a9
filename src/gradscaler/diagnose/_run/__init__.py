"""A run and its verdict."""
