"""Locate the operation or module that made the first Inf or NaN of a step."""
