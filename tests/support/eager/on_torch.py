"""PyTorch."""

from tests.support.eager.torch_like import TorchLike

instance = TorchLike("torch")
