"""The epoch and the batch of a step, from the iterators of PyTorch's DataLoaders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor.by_identity import ByIdentity


@dataclass
class _Epoch:
    """One pass over a loader's batches, which is an epoch once it feeds a loss."""

    loader: weakref.ref[Any]
    thread: int
    is_known: bool  # else its loader may fetch a batch before it gives the one before
    number: int = 0  # of the loader's epochs, from 1; 0 before a loss
    batch: int = 0  # when it was last asked


_open = ByIdentity[_Epoch | None]()  # by iterators
_counts = ByIdentity[int]()  # epochs, by loaders
_latest = ByIdentity[_Epoch | None]()  # the one that fed the latest loss


def noting(iterate: Callable[..., Any]) -> Any:
    """A function in place of ``DataLoader.__iter__``, which it calls."""
    note = guarded(_note)

    @in_place_of(iterate)
    def seen(self: Any) -> Any:
        iterator = iterate(self)
        note(self, iterator)
        return iterator

    return seen


def _note(loader: Any, iterator: Any) -> None:
    is_torchs = str(getattr(type(loader).__iter__, "__module__", "")).startswith("torch.")
    _open[iterator] = _Epoch(weakref.ref(loader), get_ident(), is_torchs)


def forget() -> None:
    """Forget all iterators."""
    for each in (_open, _counts, _latest):
        each.clear()


def fed() -> tuple[int, int] | None:
    """The epoch and the batch that feed a loss, both from 1; None if they are unknown.

    The batch is of the one iterator of this thread that has given one since the loss before. If
    none has, one batch feeds several losses; if several have, it is not known which of them feeds.
    """
    if not _open:
        return None
    moved = []
    for iterator in _open:
        epoch, batch = _open.get(iterator, None), getattr(iterator, "_num_yielded", 0)
        if epoch is not None and epoch.thread == get_ident() and epoch.batch != batch:
            epoch.batch = batch
            moved.append((iterator, epoch))
    if moved:
        _latest.clear()
    if len(moved) == 1 and moved[0][1].is_known:
        ((iterator, epoch),) = moved
        loader = epoch.loader()
        if not epoch.number and loader is not None:
            epoch.number = _counts[loader] = _counts.get(loader, 0) + 1
        if epoch.number:  # else its loader is gone, and which epoch it is, unknown
            _latest[iterator] = epoch
    latest = (_latest.get(iterator, None) for iterator in _latest)
    return next(((e.number, e.batch) for e in latest if e and e.thread == get_ident()), None)
