"""Gradients of any framework: how large they are, and which are not finite."""
