"""TensorPlay."""

from tests.support.eager.torch_like import TorchLike


class TensorPlay(TorchLike):
    def exact_tensor(self, tensor):
        if tensor.is_sparse:
            return ("sparse", self.exact(tensor.to_dense()))
        return super().exact_tensor(tensor)


instance = TensorPlay("tensorplay")
instance.framework.set_num_threads(1)  # the tests' tensors are too small to share among threads
