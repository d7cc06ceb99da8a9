"""The eager engine: scale, unscale, step or skip, update, for every eager framework."""
