"""PyTorch."""

from libraries.torch_like import TorchLike

library = TorchLike("torch")
