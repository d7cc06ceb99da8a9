"""What each framework's scaler saves: a flat dict of numbers, to and from a rule and a state."""
