"""The state dicts of every framework's scaler, converted to and from a rule and a state."""
