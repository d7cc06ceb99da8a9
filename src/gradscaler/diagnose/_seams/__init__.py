"""The operations of one step, in each framework, and the judge of where an Inf or NaN began."""
