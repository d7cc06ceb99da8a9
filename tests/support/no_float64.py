"""A device without float64, as Intel's Arc: the CPU, with an error for each float64 tensor.

The scaler takes it for a device that is not the host, because others have float64.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscaler._torch_like import float64
from gradscaler.torch import GradScaler


class NoFloat64(TorchDispatchMode):
    """Raises the error of XPUs where an operation gives a float64 tensor, and counts these."""

    refused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(getattr(leaf, "dtype", None) is torch.float64 for leaf in tree_leaves(result)):
            self.refused += 1
            raise RuntimeError("Required aspect fp64 is not supported on the device")
        return result


@contextmanager
def no_float64():
    """In the block, the CPU is such a device."""
    operations = GradScaler._operations
    with (
        mock.patch.dict(float64._known, clear=True),
        mock.patch.object(operations, "on_host", return_value=False),
        NoFloat64() as mode,
    ):
        yield mode
