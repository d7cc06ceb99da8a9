"""What is kept of each parameter beside its 16 bits, in the state of its optimizer."""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import chain
from typing import Any

import torch

from gradscaler._on_torch.processes import is_dtensor, to_local
from gradscaler.torch._weights.chunks import Piece
from gradscaler.torch._weights.stores import KEYS, Store, stream_of, wide_values

State = MutableMapping[torch.Tensor, dict[str, Any]]


class Entries:
    """The entries of a store. A parameter's is in its state from its first step on.

    Before, it is here: code that loads checkpoints takes an optimizer with a state for one that
    has stepped.

    Args:
        store: what makes and uses them.
        seed: of random numbers.
    """

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self._seed = store, seed
        self._fresh: dict[torch.Tensor, torch.Tensor] = {}
        self._written: dict[torch.Tensor, tuple[int, int]] = {}  # versions of what was written

    def add(self, parameter: torch.Tensor, wide: torch.Tensor, index: int) -> None:
        """Make the entry of a parameter with these float32 values, to which it is rounded."""
        local, local_wide = to_local([parameter.detach(), wide])
        entry = self.store.entry(local, local_wide, stream_of(self._seed, index))
        self._fresh[parameter] = entry if self.store.is_random else like(parameter, entry)

    def open(self, piece: Piece, state: State, groups: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Widen the parameters of a piece, which are in these groups.

        Returns:
            What has their float32 values now, laid out as each parameter is.
        """
        entries = [self._entry(p, state, groups) for p in piece.parameters]
        piece.entries = to_local(entries)
        if not self.store.has_values:
            self.store.open(piece, piece.entries)
            return list(map(like, piece.parameters, piece.wide_views))
        for p, local, master in zip(piece.parameters, piece.locals, piece.entries, strict=True):
            if self._written.get(p) != _version(local):  # someone else may have set it
                master.copy_(wide_values(local, {"master": master}))
        return entries

    def close(self, piece: Piece) -> None:
        """Round the float32 values, which were stepped, to the parameters."""
        self.store.close(piece, piece.entries)
        if self._fresh:  # until now, as a step that raises may be undone with the whole state
            for parameter in piece.parameters:
                self._fresh.pop(parameter, None)
        if self.store.has_values:
            versions = map(_version, piece.locals)
            self._written.update(zip(piece.parameters, versions, strict=True))

    def wide(self, parameter: torch.Tensor, state: State) -> torch.Tensor:
        """A parameter's float32 values, in a new tensor."""
        (local,) = to_local([parameter.detach()])
        return like(parameter, wide_values(local, self._local(parameter, state)))

    def saved(self, state: State) -> State:
        """The state of all parameters, with the entries of those that did not step yet."""
        saved = dict(state)
        for parameter, entry in self._fresh.items():
            saved[parameter] = {**saved.get(parameter, {}), self.store.key: entry}
        return saved

    def forget(self) -> None:
        """Begin anew, with a state that was loaded."""
        self._fresh, self._written = {}, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_written": {}}

    def _entry(
        self, parameter: torch.Tensor, state: State, groups: list[dict[str, Any]]
    ) -> torch.Tensor:
        """A parameter's entry; made, if need be, of another store's, or of its 16 bits."""
        key = self.store.key
        of_parameter = state.setdefault(parameter, {})
        if key not in of_parameter:
            if parameter not in self._fresh:
                in_order = chain.from_iterable(group["params"] for group in groups)
                index = next(i for i, each in enumerate(in_order) if each is parameter)
                self.add(parameter, self.wide(parameter, state), index)
            for other in KEYS:
                of_parameter.pop(other, None)
            of_parameter[key] = self._fresh[parameter]
        entry: torch.Tensor = of_parameter[key]
        return entry

    def _local(self, parameter: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """Whatever is kept of a parameter, by the key of its store: this process' parts."""
        entries = dict(state.get(parameter, {}))
        if parameter in self._fresh:
            entries[self.store.key] = self._fresh[parameter]
        return {key: to_local([entries[key]])[0] for key in KEYS if key in entries}


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is laid out as a parameter is, of this process' part."""
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


def _version(local: torch.Tensor) -> tuple[int, int]:
    """What changes when someone writes to a tensor, or puts another in its place."""
    return local._version, local.data_ptr()
