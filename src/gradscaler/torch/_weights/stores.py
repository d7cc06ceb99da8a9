"""Stores: ways to keep the bits of float32 values that 16-bit parameters have no room for.

For each 16-bit parameter, a store keeps one tensor in the optimizer's state, called its entry.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import ClassVar, Protocol

import torch

from gradscaler._on_torch.processes import is_dtensor
from gradscaler.torch._weights.chunks import Piece
from gradscaler.torch._weights.rounding import (
    join,
    join_,
    random_bits,
    round_at_random_,
    split,
    split_,
)


class Store(Protocol):
    """One way to keep these bits. All tensors are this process' parts.

    Attributes:
        key: the key of an entry in its parameter's state.
        has_values: whether entries are the float32 values themselves, so that nothing is widened.
        is_random: whether steps draw random numbers.
    """

    key: ClassVar[str]
    has_values: ClassVar[bool]
    is_random: ClassVar[bool]

    def entry(self, local: torch.Tensor, wide: torch.Tensor, stream: int) -> torch.Tensor:
        """Set a parameter to its float32 values, rounded, and return its entry.

        ``stream`` is the seed of the parameter's random numbers, different for each parameter.
        """

    def open(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        """Fill ``piece.wide``, or entries that have the values, with the float32 values."""

    def close(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        """Set the parameters to the stepped values, rounded, and update the entries."""


class Masters:
    """Keeps float32 copies, 4 bytes each."""

    key: ClassVar[str] = "master"
    has_values: ClassVar[bool] = True
    is_random: ClassVar[bool] = False

    def entry(self, local: torch.Tensor, wide: torch.Tensor, stream: int) -> torch.Tensor:
        local.copy_(wide)
        same_layout = wide.stride() == local.stride()
        return wide if same_layout else torch.empty_like(local, dtype=wide.dtype).copy_(wide)

    def open(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        """Set masters to their parameters' values where other code has set the parameters.

        A tensor's version does not show that: it stays where ``parameter.data`` is written to.
        """
        assert piece.gradients is not None
        (rounded, narrow), (rounded_views, narrow_views) = piece.halves, piece.half_views
        gradient_views = piece.as_stepped(piece.gradients, piece.gradient_views)
        rounded_views = piece.as_stepped(rounded, rounded_views)
        torch._foreach_copy_(rounded_views, entries)
        if piece.span is None:
            torch._foreach_copy_(narrow_views, piece.locals)
        else:
            (narrow,) = piece.locals  # flat, too
        if rounded.is_cpu:  # elsewhere, the host would wait
            if _are_zero(rounded.view(torch.int16).sub_(narrow.view(torch.int16))):
                return
            torch._foreach_copy_(rounded_views, entries)
        is_kept, values = rounded == narrow, narrow.float()
        torch._foreach_copy_(gradient_views, entries)
        torch.where(is_kept, piece.gradients, values, out=piece.gradients)
        torch._foreach_copy_(entries, gradient_views)

    def close(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        if piece.lent is not None and piece.span is None:
            piece.halves[0].copy_(entries[0])
            entries = piece.half_views[0]
        torch._foreach_copy_(piece.locals, entries)


class Remainders:
    """Keeps the distances from the parameters to their float32 values, 2 bytes each."""

    key: ClassVar[str] = "remainder"
    has_values: ClassVar[bool] = False
    is_random: ClassVar[bool] = False

    def entry(self, local: torch.Tensor, wide: torch.Tensor, stream: int) -> torch.Tensor:
        narrow, remainder = split(wide, local.dtype)
        local.copy_(narrow)
        return remainder

    def open(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        assert piece.wide is not None
        assert piece.units is not None
        is_float16 = piece.dtype is torch.float16
        remainder = piece.gradients if is_float16 else piece.narrow
        views = piece.gradient_views if is_float16 else piece.narrow_views
        assert remainder is not None
        torch._foreach_copy_(piece.wide_views, piece.locals)
        torch._foreach_copy_(piece.as_stepped(remainder, views), entries)
        join_(piece.wide, remainder, piece.units, piece.dtype)

    def close(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        assert piece.wide is not None
        assert piece.narrow is not None
        assert piece.gradients is not None
        assert piece.remainders is not None
        narrow = piece.narrow.view(piece.dtype)
        split_(piece.wide, narrow, piece.gradients, piece.remainders)
        remainders = piece.as_stepped(piece.remainders, piece.remainder_views)
        # In one call, which nothing interrupts. All are int16, for the kernel that takes them all.
        locals_ = [local.view(torch.int16) for local in piece.locals]
        torch._foreach_copy_([*locals_, *entries], [*piece.narrow_views, *remainders])


class Nothing:
    """Keeps no bits: values are rounded at random.

    An entry describes a stream of random numbers by two integers: its seed, and the number of
    draws. So a parameter's random numbers depend neither on the other parameters nor on the split
    of parameters among processes. Copies of a parameter on several processes are rounded alike.
    Each span of a split parameter has numbers of its own.
    """

    key: ClassVar[str] = "rounding"
    has_values: ClassVar[bool] = False
    is_random: ClassVar[bool] = True

    def entry(self, local: torch.Tensor, wide: torch.Tensor, stream: int) -> torch.Tensor:
        local.copy_(wide)
        return torch.tensor([stream, 0])

    def open(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        torch._foreach_copy_(piece.wide_views, piece.locals)

    def close(self, piece: Piece, entries: list[torch.Tensor]) -> None:
        assert piece.wide is not None
        assert piece.narrow is not None
        assert piece.units is not None
        assert piece.gradients is not None
        generator = torch.Generator(piece.device)
        drawn = []
        for parameter, local, entry in zip(piece.parameters, piece.locals, entries, strict=True):
            span = () if piece.span is None else (piece.span.begin,)
            generator.manual_seed(mixed(*entry.tolist(), *_shard_of(parameter), *span))
            drawn.append(random_bits(local.numel(), generator))
        memory = piece.units, piece.gradients  # the gradients are no longer needed
        rounded = round_at_random_(piece.wide, piece.dtype, torch.cat(drawn), *memory)
        piece.narrow.view(piece.dtype).copy_(rounded)
        for entry in entries if piece.span is None or piece.span.is_last else ():
            entry[1] += 1  # first, so that an interrupt repeats no numbers
        torch._foreach_copy_(piece.locals, piece.rounded_views)


STORES: dict[str, Store] = {
    "float32": Masters(),
    "remainder16": Remainders(),
    "stochastic": Nothing(),
}
KEYS = tuple(store.key for store in STORES.values())


def wide_values(local: torch.Tensor, entries: dict[str, torch.Tensor]) -> torch.Tensor:
    """The float32 values of a parameter in a new tensor, from the entry of any store.

    A master counts only where it rounds to the parameter's value. Elsewhere, other code has set the
    parameter, and the parameter's own value counts.
    """
    if "master" in entries:
        master = entries["master"]
        return torch.where(master.to(local.dtype) == local, master, local.float())
    return join(local, entries["remainder"]) if "remainder" in entries else local.float()


def stream_of(seed: int, index: int) -> int:
    """The seed of one parameter's random numbers."""
    return mixed((seed + 2**63) % 2**64 - 2**63, index)  # torch.seed() returns up to 64 bits


def mixed(*numbers: int) -> int:
    """A 63-bit hash of the numbers."""
    digest = blake2b(struct.pack(f"{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _are_zero(difference: torch.Tensor) -> bool:
    """Whether int16 numbers are all 0, in a quarter of the time of ``torch.equal``."""
    return not difference.numel() or not any(map(bool, difference.aminmax()))


def _shard_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The position of this process' part of a DTensor; copies of a part have the same position."""
    if not is_dtensor(parameter):
        return ()
    on_mesh = parameter.device_mesh.get_coordinate() or ()
    return tuple(
        i
        for i, placement in zip(on_mesh, parameter.placements, strict=True)
        if not placement.is_replicate()
    )
