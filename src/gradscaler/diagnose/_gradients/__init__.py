"""Gradients of any framework: how large they are, which are not finite, and what made them so."""
