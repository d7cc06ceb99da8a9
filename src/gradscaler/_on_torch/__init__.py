"""PyTorch's tensors and PyTorch's processes, for every adapter that works on them."""
