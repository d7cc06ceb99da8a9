"""The entries: tensors in the optimizer's state that complete 16-bit parameters to float32."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

from gradscaler._on_torch.processes import is_dtensor, to_local
from gradscaler.torch._weights.chunks import Piece
from gradscaler.torch._weights.flat import is_dense
from gradscaler.torch._weights.stores import KEYS, Store, stream_of, wide_values
from gradscaler.torch._weights.wrapped import Places, without_entries

State = MutableMapping[torch.Tensor, dict[str, Any]]


class Entries:
    """The entries of a store.

    A parameter's entry is in the optimizer's state from the parameter's first step on. Until then,
    it is in this object, because code that loads checkpoints assumes that an optimizer with a state
    has stepped.

    Args:
        store: the store that makes and uses the entries.
        seed: the seed of random numbers.

    A step may be interrupted at any line. An entry is in this object until it is in the state, and
    neither is without it in between. So a state dict has it at any time, in a handler of signals
    and in another thread, too.
    """

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self._seed = store, seed
        self._fresh: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, parameter: torch.Tensor, wide: torch.Tensor, index: int) -> None:
        """Set a parameter to its float32 values, rounded, and make its entry."""
        local, local_wide = to_local([parameter.detach(), wide])
        entry = self.store.entry(local, local_wide, stream_of(self._seed, index))
        self._fresh[parameter] = entry if self.store.is_random else like(parameter, entry)

    def lay_out(self, parameters: Iterable[torch.Tensor], state: State) -> None:
        """Give all tensors of the parameters' shapes the parameters' order of memory.

        Fused kernels read a parameter, its gradient and its state in order. The orders differ where
        a model was given another one, or where a state dict has the order of another model.
        """
        for p in parameters:
            if p in self._fresh:
                self._fresh[p] = _laid_out(self._fresh[p], p)
            of_parameter = state.get(p, {})
            of_parameter.update((key, _laid_out(v, p)) for key, v in [*of_parameter.items()])

    def open(self, piece: Piece, state: State, places: Places) -> list[torch.Tensor]:
        """Widen the parameters of a piece; ``places`` are theirs in the groups.

        Returns:
            Tensors with the float32 values, one for each parameter that the piece steps.
        """
        for parameter in piece.parameters:
            self._entry(parameter, state, places)
        key, is_random = self.store.key, self.store.is_random
        states = [state[p] for p in piece.parameters]
        piece.lend(states, key, with_entries=not is_random)  # which may replace entries
        entries = [each[key] for each in states]
        for parameter in self._fresh.keys() & piece.parameters:
            self._fresh[parameter] = state[parameter][key]
        if piece.lent is None or is_random:
            piece.entries = to_local(entries)
        else:
            piece.entries = [piece.lent.pop(key)]
        self.store.open(piece, piece.entries)
        if self.store.has_values:
            return entries if piece.lent is None else piece.entries
        return list(map(like, piece.stepped, piece.as_stepped(piece.wide, piece.wide_views)))

    def close(self, piece: Piece) -> None:
        """Set the parameters of a piece to their stepped float32 values, rounded.

        Without gradients, they seldom have new values. A value that has not changed must keep its
        16 bits, and draw no random numbers.
        """
        if not piece.has_gradients and piece.wide is not None:
            stepped = piece.wide.clone()
            self.store.open(piece, piece.entries)
            if torch.equal(stepped.view(torch.int32), piece.wide.view(torch.int32)):
                return
            piece.wide.copy_(stepped)
        self.store.close(piece, piece.entries)
        if self._fresh:  # kept until now: if a step raises, the user may restore the old state
            for parameter in piece.parameters:
                self._fresh.pop(parameter, None)

    def local(self, parameter: torch.Tensor, state: State, index: int) -> torch.Tensor:
        """A parameter's entry, to be changed in place before a step; this process' part."""
        return to_local([self._before_step(parameter, state, index)])[0]

    def keep(self, piece: Piece) -> None:
        """Round the parameters of a piece after a step that raised, as far as it was taken.

        Masters that it has changed would else be set back to their parameters, without low bits.
        """
        if self.store.has_values:
            self.store.close(piece, piece.entries)

    def drop(self, parameter: torch.Tensor) -> None:
        """Discard the entry of a parameter that was not added after all."""
        self._fresh.pop(parameter, None)

    def wide(self, parameter: torch.Tensor, state: State) -> torch.Tensor:
        """The float32 values of a parameter, in a new tensor."""
        (local,) = to_local([parameter.detach()])
        return like(parameter, wide_values(local, self.of(parameter, state)))

    def saved(self, state: State) -> dict[Any, dict[str, Any]]:
        """The state of all parameters, with the entries of parameters that have not yet stepped."""
        fresh, saved = dict(self._fresh), dict(state)  # in this order: entries move to the state
        for parameter, entry in fresh.items():
            kept = without_entries(saved.get(parameter, {}))
            saved[parameter] = {**kept, self.store.key: entry}
        return saved

    def emptied(self) -> Entries:
        """Entries of the same store for another state, which was loaded."""
        return Entries(self.store, self._seed)

    def _entry(self, parameter: torch.Tensor, state: State, places: Places) -> torch.Tensor:
        """The entry of a parameter, from now on in the state."""
        of_parameter, key = state.get(parameter, {}), self.store.key
        if key not in of_parameter:
            entry = self._before_step(parameter, state, places[parameter][1])
            of_parameter = state[parameter] = {**without_entries(of_parameter), key: entry}
        tensor: torch.Tensor = of_parameter[key]
        return tensor

    def _before_step(self, parameter: torch.Tensor, state: State, index: int) -> torch.Tensor:
        """The entry of a parameter; if not in the state, it stays in this object.

        If there is none, it is made from another store's entry, or from the parameter's value.
        """
        of_parameter = state.get(parameter, {})
        if self.store.key in of_parameter:
            entry: torch.Tensor = of_parameter[self.store.key]
            return entry
        if parameter not in self._fresh:
            self.add(parameter, self.wide(parameter, state), index)
        return self._fresh[parameter]

    def of(self, parameter: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """The entries of a parameter, of any store, by the store's key; this process' parts."""
        fresh = self._fresh.get(parameter)  # before the state, to which entries move
        entries = state.get(parameter, {}) if fresh is None else {self.store.key: fresh}
        return {key: to_local([entries[key]])[0] for key in KEYS if key in entries}


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """A part of a parameter's state, in the parameter's order of memory if it has its shape."""
    if (
        not isinstance(value, torch.Tensor)
        or is_dtensor(value)
        or value.layout is not torch.strided
        or value.shape != parameter.shape
        or value.stride() == parameter.stride()
        or is_dtensor(parameter)
        or not is_dense(parameter)
    ):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Make a tensor with a parameter's layout from this process' part of it."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
