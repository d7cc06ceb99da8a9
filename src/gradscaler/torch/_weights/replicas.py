"""DistributedDataParallel (DDP), whose processes must begin with the same float32 values.

DDP's constructor gives the 16-bit parameters of its first process to all others. It does not know
the entries that complete them to float32, so these are given to all in the same moment.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradscaler._in_memory import in_memory
from gradscaler.errors import ParameterError
from gradscaler.torch._weights.stores import mixed

EntriesOf = Callable[[Collection[int]], list[torch.Tensor]]
"""A method of an optimizer: the entries of those of its parameters that have one of the ids."""

# In the order of construction, which all processes share.
_optimizers: list[weakref.WeakMethod[EntriesOf]] = []


def share(entries_of: EntriesOf) -> None:
    """Share an optimizer's entries in each DDP that is constructed from now on."""
    _watch_constructors()
    _optimizers[:] = [each for each in _optimizers if each() is not None]
    _optimizers.append(weakref.WeakMethod(entries_of))


def must_not_be_replicated(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse to cast parameters of a model that is in DDP already.

    Raises:
        ParameterError: DDP would no longer average the gradients.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()  # a DDP that was deleted may be part of a circle
    models = in_memory(DistributedDataParallel)
    whole = [ddp for ddp in models if hasattr(ddp, "module")]  # unless its constructor raised
    replicated = {id(p) for ddp in whole for p in _shared(ddp, ddp.module)}
    if any(id(parameter) in replicated for parameter in parameters):
        raise ParameterError(
            "DistributedDataParallel has laid out gradients for float32 parameters: call "
            "MasterWeights with the model before it is wrapped"
        )


@cache
def _watch_constructors() -> None:
    register_module_module_registration_hook(_share_entries)


def _share_entries(ddp: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Give the first process's entries to all, if DDP's constructor is registering its model."""
    if name != "module" or not isinstance(ddp, DistributedDataParallel) or name in ddp._modules:
        return
    gc.collect()  # else an optimizer that was deleted may still exist on some processes only
    shared = [p for p in _shared(ddp, module) if p.requires_grad]
    ids = set(map(id, shared))
    methods = [method for each in _optimizers if (method := each()) is not None]
    entries = [entry for entries_of in methods for entry in entries_of(ids) if entry.numel()]
    if entries and ddp.process_group.size() > 1:
        _must_be_alike(entries, ddp.process_group, shared[0].device)
        for entry in entries:
            _broadcast(entry, ddp.process_group, shared[0].device)


def _shared(ddp: DistributedDataParallel, module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters that DDP keeps alike."""
    ignored = ddp.parameters_to_ignore
    return [p for name, p in module.named_parameters() if name not in ignored]


def _must_be_alike(
    entries: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """ParameterError on all processes if their entries differ in number, shape or dtype."""
    numbers = [each for entry in entries for each in (entry.itemsize, entry.ndim, *entry.shape)]
    digest = mixed(*numbers)
    bounds = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    if bounds.tolist() != [digest, -digest]:
        raise ParameterError(
            "MasterWeights has other parameters, or another store, on some processes of "
            "DistributedDataParallel: construct the model and MasterWeights alike on all of them"
        )


def _broadcast(entry: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Set an entry to the first process's, as bytes: no backend sends int16."""
    sent = entry.to(device).reshape(-1).view(torch.uint8).clone()
    dist.broadcast(sent, group=group, group_src=0)
    entry.copy_(sent.view(entry.dtype).view(entry.shape))
