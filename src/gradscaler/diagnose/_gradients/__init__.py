"""Gradients of any framework: their sizes, which are not finite, and which scales fit them."""
