"""A scaler that is disabled though the model computes in float16."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from gradscaler.diagnose._graph.hooks import weakly
from gradscaler.diagnose._monitor.step_log import StepLog

_ENOUGH = 10  # forward passes that are looked at


class DisabledScaler:
    """Notes the first forward passes of PyTorch that compute in float16 under a disabled scaler.

    The scaler announces nothing then. A hook on the model sees its output, and whether autocast is
    on. It is removed after ten such passes.
    """

    def __init__(self, model: Any, log: StepLog) -> None:
        self._calls: list[str] = []
        self._log = weakref.ref(log)
        register = getattr(model, "register_forward_hook", None)
        self._hook = None if register is None else register(weakly(self._see))

    def _see(self, module: object, inputs: object, output: object) -> None:
        log = self._log()
        if log is None or not _is_in_float16(output):
            return
        self._calls.append("disabled")
        if len(self._calls) == _ENOUGH:
            self.stop()
        log.note_calls(self._calls)

    def stop(self) -> None:
        """Look at no more forward passes."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()


def _is_in_float16(output: Any) -> bool:
    """Whether an output that is trained is float16, or was computed under autocast to it."""
    torch: Any = sys.modules["torch"]  # whose model has the hook
    each = output.values() if isinstance(output, Mapping) else output
    tensors = (output,) if isinstance(output, torch.Tensor) else each
    for tensor in tensors if isinstance(tensors, Iterable) else ():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            device = tensor.device.type
            is_cast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if is_cast else tensor.dtype
            return bool(torch.float16 in (dtype, tensor.dtype))
    return False
