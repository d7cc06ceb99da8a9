"""Groups parameters into chunks, and owns the memory in which chunks are widened one by one.

If the optimizer treats each element alone, the parameters of a chunk are joined and stepped as one
flat tensor, and a parameter with more elements than a chunk may have is split. The memory has the
size that the largest chunk needs. It is only allocated during a step: afterwards its storages are
resized to 0 bytes, and all views of them stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from itertools import groupby, pairwise

import torch

from gradscaler._on_torch.operations import TorchOperations
from gradscaler._on_torch.processes import Part, placed, to_local
from gradscaler.torch._weights.flat import Joined, Layout, Span, State
from gradscaler.torch._weights.rounding import DTYPES

REGISTER = 16
"""float32 elements of the largest vector register of a CPU.

Fused kernels round an element by itself in another way than one of a full register.
"""
_OPERATIONS = TorchOperations()


class Piece:
    """The parameters of one kind in a chunk, or a span of a single parameter.

    Args:
        parameters: the parameters of the model.
        span: the span of the only parameter; None for whole parameters.
        may_join: whether the parameters may be stepped as one flat tensor.

    Attributes:
        dtype: the dtype of the parameters.
        has_gradients: whether the parameters have gradients: all, or no one of them.
        is_narrow: whether ``dtype`` has 16 bits, so that the parameters are stepped in float32.
        locals: this process' parts of the parameters, or the span of the one parameter.
        lent: the optimizer's state of the flat tensor that this step steps in place of the
            parameters: of all of them, joined, or of a span. None if it steps each parameter.
        entries: the store's entries for ``locals``; if ``lent`` is not None, the flat one that it
            has, or those of random numbers.
        gradients: flat memory for all float32 gradients; None for a dtype other than 16 bits and
            float32.
        gradient_views: views of ``gradients`` in the shape of each parameter.
        wide: flat memory for all float32 values; None if they need no widening.
        wide_views: views of ``wide`` in the shape of each parameter.
        narrow: flat int16 memory for 16 bits of each value; None if ``wide`` is None.
        narrow_views: views of ``narrow`` in the shape of each parameter.
        rounded_views: ``narrow_views``, read as ``dtype``.
        units: flat float32 memory for a unit of each value; None if ``wide`` is None.
        remainders: flat int16 memory, a part of that of ``gradients``; None if ``wide`` is None.
        remainder_views: views of ``remainders`` in the shape of each parameter.
        halves: two flat tensors of ``dtype`` for all values, in the memory of ``gradients``; empty
            if ``wide`` is not None.
        half_views: views of both ``halves`` in the shape of each parameter.
    """

    gradients: torch.Tensor | None = None
    wide: torch.Tensor | None = None
    narrow: torch.Tensor | None = None
    units: torch.Tensor | None = None
    remainders: torch.Tensor | None = None
    lent: State | None = None

    def __init__(
        self,
        parameters: list[torch.Tensor],
        span: Span | None = None,
        *,
        may_join: bool = False,
    ) -> None:
        self.parameters, self.span = parameters, span
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.is_narrow = self.dtype in DTYPES
        self.has_gradients = parameters[0].grad is not None
        self.takes_float32 = self.is_narrow or self.dtype is torch.float32
        self.entries: list[torch.Tensor] = []
        self.gradient_views: list[torch.Tensor] = []
        self.wide_views: list[torch.Tensor] = []
        self.narrow_views: list[torch.Tensor] = []
        self.rounded_views: list[torch.Tensor] = []
        self.remainder_views: list[torch.Tensor] = []
        self.halves: list[torch.Tensor] = []
        self.half_views: list[list[torch.Tensor]] = []
        self.look_up()
        self._layout = Layout(self.locals)
        self.size = self._layout.size
        self._flat = Joined(self._layout, len(parameters)) if may_join else span

    def look_up(self) -> None:
        """Find this process' parts again, because FSDP, for example, may have moved them."""
        self.locals = self.spans(to_local([parameter.detach() for parameter in self.parameters]))

    def spans(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The span of this piece in tensors that have its parameters' layout."""
        return tensors if self.span is None else list(map(self.span.of, tensors))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor in the shape and memory order of each of ``locals``."""
        return self._layout.views(flat)

    @property
    def stepped(self) -> list[torch.Tensor]:
        """The parameters that tensors stand in for: the first one for a flat tensor of all."""
        return self.parameters if self.lent is None else self.parameters[:1]

    def lend(self, states: list[State], entry: str = "", *, with_entries: bool = False) -> None:
        """Make ``lent`` from the parameters' states.

        Args:
            states: the state of each parameter.
            entry: the key of the store's entries in them.
            with_entries: whether entries are lent, too.
        """
        self.lent = None
        if self._flat is None or any(_is_sparse(p.grad) for p in self.parameters):
            return
        keys = [*(key for key in states[0] if key != entry), *[entry] * with_entries]
        if all(state.keys() == states[0].keys() for state in states):
            self.lent = self._flat.lend(states, keys, entry)

    def as_stepped(
        self, flat: torch.Tensor | None, views: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Flat memory as this step takes it: the memory itself, or its view for each parameter."""
        return views if self.lent is None or flat is None else [flat]

    def take_back(self, stepped: State, state: MutableMapping[torch.Tensor, State]) -> None:
        """Bring the parameters' states to that of the flat tensor after its step.

        A state to which keys are added is a new one, as other code may be reading the old one.
        """
        assert self._flat is not None
        assert self.lent is not None
        states = [state[p] for p in self.parameters]
        new = self._flat.take_back(self.lent, stepped, states)
        for parameter, old, more in zip(self.parameters, states, new, strict=True):
            if more:
                state[parameter] = {**old, **more}

    def widened_gradients(self, factor: torch.Tensor | None) -> list[torch.Tensor]:
        """The gradients times ``factor``, in the dtype of the step; this process' parts.

        There is one for each parameter, or the flat one if ``lent`` is not None.
        """
        grads = [p.grad.detach() for p in self.parameters if p.grad is not None]
        parts = self.spans(to_local(placed(Part([{"params": self.parameters}]), grads)))
        dtype = torch.float32 if self.is_narrow else self.dtype
        is_ready = self.lent is None or len(parts) == 1
        has_dtype = all(part.dtype is dtype for part in parts)
        if is_ready and factor is None and has_dtype and all(map(_has_order, parts, self.locals)):
            return parts
        if factor is not None:
            factor = _OPERATIONS.on_device(factor, self.device)
        if self.gradients is None or any(part.is_sparse for part in parts):
            wide = [part.to(dtype) for part in parts]
            return wide if factor is None else [part * factor for part in wide]
        torch._foreach_copy_(self.gradient_views, parts)
        if factor is not None:
            self.gradients.mul_(factor)
        return self.as_stepped(self.gradients, self.gradient_views)


class Chunks:
    """Chunks of pieces, and their memory.

    Args:
        parameters: all parameters to step.
        size: the largest number of elements of a chunk, unless a single parameter has more; None
            for one chunk of all parameters.
        to_split: those parameters with more elements than ``size`` that are split. Spans fill
            registers, so that each element is rounded as in the whole parameter.
        to_join: lists of parameters, of one chunk each, that may be stepped as one flat tensor.
        widens_values: whether the values of narrow parameters need memory, as gradients do.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        size: int | None,
        to_split: list[torch.Tensor],
        to_join: list[list[torch.Tensor]],
        widens_values: bool,
    ) -> None:
        others = set(parameters).difference(to_split, *to_join)
        self.chunks = [
            [Piece(list(alike)) for _, alike in groupby(sorted(chunk, key=_kind), key=_kind)]
            for chunk in chunked([p for p in parameters if p in others], size)
        ]
        self.chunks += [[Piece(run, may_join=True)] for run in to_join]
        for p in to_split:
            assert size is not None
            length = size - size % REGISTER or size
            ends = (*range(length, p.numel(), length), p.numel())
            layout = Layout([p.detach()])
            spans = [Span(begin, end, layout) for begin, end in pairwise((0, *ends))]
            self.chunks += [[Piece([p], span)] for span in spans]
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        for device in {parameter.device for parameter in parameters}:
            self._place("gradients", device, torch.float32, lambda piece: piece.takes_float32)
            if widens_values:
                self._place("wide", device, torch.float32, lambda piece: piece.is_narrow)
                self._place("narrow", device, torch.int16, lambda piece: piece.is_narrow)
                self._place("units", device, torch.float32, lambda piece: piece.is_narrow)
        for piece in (piece for chunk in self.chunks for piece in chunk):
            if piece.gradients is None:
                continue
            piece.gradient_views = piece.views(piece.gradients)
            if piece.wide is not None and piece.narrow is not None:
                piece.wide_views = piece.views(piece.wide)
                piece.narrow_views = piece.views(piece.narrow)
                piece.rounded_views = [view.view(piece.dtype) for view in piece.narrow_views]
                piece.remainders = piece.gradients.view(torch.int16)[: piece.size]
                piece.remainder_views = piece.views(piece.remainders)
            elif piece.is_narrow:
                piece.halves = list(piece.gradients.view(piece.dtype).chunk(2))
                piece.half_views = [piece.views(half) for half in piece.halves]
        self._release()

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Allocate the memory for the duration of the context."""
        try:
            for storage, size in self._storages:
                storage.resize_(size)
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def _place(
        self, name: str, device: torch.device, dtype: torch.dtype, needs: Callable[[Piece], bool]
    ) -> None:
        """Allocate memory that all chunks share, and give each piece that needs it its part."""
        chunks = [
            [piece for piece in chunk if piece.device == device and needs(piece)]
            for chunk in self.chunks
        ]
        size = max((sum(piece.size for piece in chunk) for chunk in chunks), default=0)
        memory = torch.empty(size, dtype=dtype, device=device)
        for chunk in chunks:
            begin = 0
            for piece in chunk:
                setattr(piece, name, memory[begin : begin + piece.size])
                begin += piece.size
        storage = memory.untyped_storage()
        self._storages.append((storage, storage.nbytes()))


def _kind(parameter: torch.Tensor) -> tuple[str, str, bool]:
    return str(parameter.device), str(parameter.dtype), parameter.grad is None


def chunked(parameters: list[torch.Tensor], size: int | None) -> Iterator[list[torch.Tensor]]:
    """Lists of parameters, in their order, of at most ``size`` elements where possible."""
    chunk: list[torch.Tensor] = []
    total = 0
    for parameter in parameters:
        (local,) = to_local([parameter.detach()])
        if size is not None and chunk and total + local.numel() > size:
            yield chunk
            chunk, total = [], 0
        chunk.append(parameter)
        total += local.numel()
    if chunk:
        yield chunk


def _has_order(gradient: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a gradient has a tensor's order of memory, in which fused kernels read both."""
    return gradient.is_sparse or gradient.stride() == tensor.stride()


def _is_sparse(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_sparse
