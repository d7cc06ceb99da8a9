"""What made the first Inf or NaN of a forward or backward pass: an operation, or a module."""
