"""The eager engine: scale, unscale, step or skip, update; once, for every eager framework."""
