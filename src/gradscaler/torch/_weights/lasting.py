"""The tensors by which an optimizer of others knows the parameters: the same ones in each call."""

from __future__ import annotations

import sys
from collections import deque
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch

from gradscaler._on_torch.processes import is_dtensor, to_local
from gradscaler.torch._weights.rounding import DTYPES

Group = dict[str, Any]
StandIns = dict[torch.Tensor, torch.Tensor]


class Lasting:
    """Tensors that stand in for parameters, and groups of them, which last from call to call.

    An optimizer may know a parameter by its place in a group, or by the tensor itself, as in
    ``self.buffers[parameter]``. So each call shows it all parameters, in the same tensors, lists
    and dicts. The tensors have memory during a call only.

    Attributes:
        tensors: the tensor of each parameter.
    """

    def __init__(self) -> None:
        self.tensors: StandIns = {}
        self._groups: list[Group] = []

    def add(self, stand_ins: StandIns, groups: list[Group]) -> None:
        """Add tensors, and the groups that an optimizer has made of them."""
        self.tensors.update(stand_ins)
        self._groups += groups

    def put(self, groups: list[Group], values: StandIns) -> list[Group]:
        """Give the tensors memory and gradients, and return the groups that hold them.

        Args:
            groups: the groups of the parameters.
            values: the memory of parameters, with gradients. A parameter without it must not be
                used: its tensor is NaN, and has one element of memory, so that PyTorch refuses to
                write to it.
        """
        del self._groups[len(groups) :]
        self._groups += [{"params": []} for _ in groups[len(self._groups) :]]
        for group, own in zip(groups, self._groups, strict=True):
            tensors = own["params"]
            tensors[:] = [self._put(p, values.get(p)) for p in group["params"]]
            own.update(group, params=tensors)
            for key in own.keys() - group.keys():
                del own[key]
        return [*self._groups]

    def _put(self, parameter: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        if parameter not in self.tensors:
            self.tensors[parameter] = stand_in_of(parameter)
        tensor = self.tensors[parameter]
        _point(tensor, _nothing_like(parameter) if value is None else to_local([value])[0])
        if tensor.requires_grad is not parameter.requires_grad:
            tensor.requires_grad_(parameter.requires_grad)
        tensor.grad = None if value is None else value.grad
        return tensor

    def take_back(self, values: StandIns, holder: dict[str, Any]) -> bool:
        """Bring the memory of values to what a call has left in the tensors.

        A call may have given a tensor other memory, as ``parameter.data = ...`` does.

        Args:
            values: the memory that was given to tensors.
            holder: nested dicts, lists and objects. The memory of values and gradients is reused,
                so tensors there that share it are replaced by copies.

        Returns:
            Whether no parameter that must not be used was given other memory.
        """
        both = (each for value in values.values() for each in (value, value.grad))
        reused = {address_of(tensor) for tensor in both if tensor is not None} - {None}
        seen = {id(each) for pair in self.tensors.items() for each in pair}  # kept as they are
        _own(holder, reused, seen)
        is_right = True
        for parameter, tensor in self.tensors.items():
            (now,) = to_local([tensor.detach()])
            if parameter in values:
                (memory,) = to_local([values[parameter]])
                if not now.is_set_to(memory):
                    memory.copy_(now)
            elif now.numel():
                is_right &= not any(now.stride())
        return is_right

    def release(self) -> None:
        """Take the memory and the gradients of all tensors."""
        for tensor in self.tensors.values():
            tensor.grad = None
            (local,) = to_local([tensor.detach()])
            _point(tensor, local.new_empty(0))


def stand_in_of(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor in float32, if a parameter has 16 bits, with all that users have set there."""
    values = as_stepped(parameter.detach())
    if isinstance(parameter, torch.nn.Parameter):
        values = torch.nn.Parameter(values, parameter.requires_grad)
    elif parameter.requires_grad:
        values = values.detach().requires_grad_()
    vars(values).update({**vars(parameter), **vars(values)})
    return values


def as_stepped(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor cast to the dtype of the step: float32 for 16 bits, otherwise its own."""
    return tensor.float() if tensor.dtype in DTYPES else tensor


def _nothing_like(parameter: torch.Tensor) -> torch.Tensor:
    """NaN in the shape of a parameter, or this process' part, in the memory of one element."""
    (local,) = to_local([parameter.detach()])
    return as_stepped(local.new_full((), torch.nan)).expand(local.shape)


def _point(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Give a tensor the memory of another; a DTensor that of this process' part."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # as FSDP2 does
    else:
        tensor.data = local


def _own(value: Any, lent: set[int | None], seen: set[int]) -> Any:
    """A value without lent memory: tensors in it are copied, and what holds them is changed."""
    if id(value) in seen:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if address_of(value) in lent else value
    if isinstance(value, tuple):
        owned = [_own(each, lent, seen) for each in value]
        if all(map(is_, owned, value)):
            return value
        return value._make(owned) if hasattr(value, "_make") else tuple(owned)
    seen.add(id(value))
    held: Any = value if isinstance(value, (dict, list, deque)) else _attributes_of(value)
    for place in list(held) if isinstance(held, dict) else range(len(held)):
        owned = _own(held[place], lent, seen)
        if owned is not held[place]:
            held[place] = owned
    return value


def _attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object of other code, such as a dataclass; none of a model or a logger.

    The walk of :func:`_own` must not reach everything that a script has.
    """
    package = type(value).__module__.partition(".")[0]
    is_others = package != "torch" and package not in sys.stdlib_module_names
    if not (is_others or isinstance(value, SimpleNamespace)) or isinstance(value, torch.nn.Module):
        return {}
    attributes = getattr(value, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}  # a class has another mapping


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None if the tensor is sparse."""
    (local,) = to_local([tensor])
    return None if local.layout is not torch.strided else local.untyped_storage().data_ptr()
