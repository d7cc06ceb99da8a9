"""PyTorch."""

from libraries.torch_like import TorchLike

instance = TorchLike("torch")
