""":class:`MasterWeights`: steps 16-bit parameters in float32 with any PyTorch optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from gradscaler._on_torch.operations import TorchOperations
from gradscaler._on_torch.processes import is_dtensor
from gradscaler._torch_like.operations import Fp16GradientsError, parameters_of
from gradscaler.errors import ParameterError
from gradscaler.policies._checks import count
from gradscaler.torch._weights.casting import (
    NORMS_WITH_STATISTICS,
    Chosen,
    cast,
    chosen_in,
    must_not_be_wide,
)
from gradscaler.torch._weights.chunks import REGISTER, Chunks, Piece, chunked
from gradscaler.torch._weights.entries import Entries, like
from gradscaler.torch._weights.flat import Joined, Layout, is_dense, separate
from gradscaler.torch._weights.lasting import StandIns
from gradscaler.torch._weights.loading import entries_in, numbers_of
from gradscaler.torch._weights.overlap import must_not_overlap
from gradscaler.torch._weights.replicas import share
from gradscaler.torch._weights.rounding import DTYPES
from gradscaler.torch._weights.stores import KEYS, STORES
from gradscaler.torch._weights.wrapped import (
    Places,
    Wrapped,
    as_given,
    check,
    first_stand_ins,
    groups_of,
    in_place_of,
    listed_in,
    names_in,
    of_no_parameter,
    parameters_in,
    places_in,
    without_entries,
)

_ON_CPU = 2**19  # elements of a chunk on a CPU; with Adam's state, they fit into a cache
_ELSEWHERE = 2**25  # elements of a chunk on other devices
_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
_OPERATIONS = TorchOperations()


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that steps 16-bit parameters in float32, by the optimizer that it wraps.

    A 16-bit parameter loses an update that is smaller than half of its spacing. Training then
    stalls, where float32 parameters would still move. A step here works on one chunk of parameters
    after another. It widens the parameters and their gradients to float32, lets the wrapped
    optimizer step them, and rounds the result. The wrapped optimizer's state is float32 too::

        wide = narrow + what the store keeps
        wide = optimizer's step of wide, by the gradient * 1/scale * clip coefficient
        narrow = wide rounded; the store keeps the rest

    With the stores "float32" and "remainder16", a float16 model trains like a model with float32
    parameters under autocast. The two agree bit for bit if every parameter and buffer is float16.
    This is mixed precision with master weights (Micikevicius et al. 2018, section 3.1). The
    remainder stores the same information in half the memory.

    The optimizer unscales and skips by itself, as fused optimizers do. With a scaler, don't call
    ``unscale_``, and clip by ``scaler.clip_grad_norm_(optimizer, max_norm)``. Nothing then writes
    to float16 gradients. For ``unscale_``, see :meth:`widen_gradients_`.

    Args:
        optimizer_class: the class of any PyTorch optimizer, such as ``torch.optim.AdamW``. Its step
            must not need a closure, and must read the parameters from ``param_groups`` each time.
            A class outside PyTorch sees the same parameters in the same places in each step.
        params: a model; or parameters, named parameters or groups, as for any optimizer.
        model: the model that the parameters belong to, if ``params`` is not the model. Its
            parameters that are trained and not in ``params`` are left to other optimizers.
        dtype: the dtype that float32 parameters of the model are cast to: float16 or bfloat16. Pass
            the float32 model, because ``model.half()`` discards the low bits. None casts nothing.
            Frozen parameters are cast too, but their low bits are not kept, even if they are
            trained later. Buffers stay float32; see ``cast_buffers``.
        store: how the float32 values are kept. "float32" keeps copies of them, 4 bytes each.
            "remainder16" keeps the bits that the 16-bit values lack, 2 bytes each. It is exact for
            bfloat16, and for float16 at magnitudes of 2**-17 or more; below that, the error is at
            most 2**-41. "stochastic" keeps nothing, and rounds up or down at random, unbiased.
        keep_fp32: classes of modules, and names of modules and parameters that stay float32. The
            default is batch norms and instance norms: their running statistics need float32, and on
            every device their kernels accept it with 16-bit inputs. Other norms are cast, because
            their GPU kernels need parameters of the input's dtype. The store keeps their low bits.
        cast_buffers: classes of modules, and names of modules and buffers. Their float32 buffers
            are cast to ``dtype``, unless ``keep_fp32`` has them. The default is no buffer, because
            a buffer's low bits are lost in the cast: frequencies of rotary embeddings in bfloat16
            give wrong angles. ``[torch.nn.Module]`` stands for all buffers.
        fp32_gradients: whether the backward pass adds up gradients in float32, so that accumulation
            over micro-batches is as precise as with float32 parameters. It takes 2 more bytes per
            parameter, and needs a PyTorch that has ``Tensor.grad_dtype``.
        seed: the seed of the random numbers of "stochastic".
        chunk_elements: the largest number of elements that are widened at once. A larger parameter
            is stepped in spans from its second step on, if the class is PyTorch's and treats each
            element alone; a sharded parameter is not split. Spans of 16 or more elements have a
            multiple of 16, so that fused kernels, which take no shorter ones, round as in the whole
            parameter. On a CPU, such a class steps the
            parameters of a chunk and a group as one flat tensor, and their states are views of one
            memory. The default is 2**19 on a CPU and 2**25 elsewhere. A class outside PyTorch takes
            none, because such an optimizer may compare parameters.
        kwargs: arguments of ``optimizer_class``: ``lr``, ``foreach``, ``fused`` and so on.

    Raises:
        ParameterError: an argument is invalid. This error is a ValueError.
        TypeError: ``optimizer_class`` is not the class of an optimizer.

    >>> import torch
    >>> from gradscaler.torch import GradScaler
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = MasterWeights(torch.optim.AdamW, model, lr=1e-3)
    >>> model.weight.dtype
    torch.float16
    >>> scaler = GradScaler()
    >>> scaler.scale(model(torch.ones(2, dtype=torch.float16)).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> optimizer.wide(model.weight).dtype
    torch.float32
    """

    _step_supports_amp_scaling: ClassVar[bool] = True
    clip_coefficient: torch.Tensor | None = None  # set by gradscaler's scalers for one step
    _wrapped: Wrapped | None = None
    _chunks: tuple[object, Chunks] | None = None
    _kept: Sequence[torch.Tensor] = ()  # float32 parameters that add_param_group must not cast

    def __init__(  # noqa: PLR0913 # an optimizer's own parameters come as kwargs
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: torch.nn.Module | ParamsT,
        *,
        model: torch.nn.Module | None = None,
        dtype: torch.dtype | None = torch.float16,
        store: str = "remainder16",
        keep_fp32: Chosen = NORMS_WITH_STATISTICS,
        cast_buffers: Chosen = (),
        fp32_gradients: bool = False,
        seed: int = 0,
        chunk_elements: int | None = None,
        **kwargs: object,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ParameterError(f"dtype must be one of {DTYPES} or None, got {dtype!r}")
        if store not in tuple(STORES):
            raise ParameterError(f"store must be one of {sorted(STORES)}, got {store!r}")
        if chunk_elements is not None:
            chunk_elements = count("chunk_elements", chunk_elements)
        check(optimizer_class, kwargs, chunk_elements)
        if not isinstance(fp32_gradients, bool):
            raise ParameterError(f"fp32_gradients must be True or False, got {fp32_gradients!r}")
        if not isinstance(seed, int):
            raise ParameterError(f"seed must be an int, got {seed!r}")
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ParameterError(f"model must be a torch.nn.Module, got {model!r}")
        if isinstance(params, torch.nn.Module):
            if model not in (None, params):
                raise ParameterError("params is a model, and model is another: give one of them")
            model, params = params, params.parameters()
        self._dtype, self._chunk_elements = dtype, chunk_elements
        self._fp32_gradients = fp32_gradients
        self._entries = Entries(STORES[store], seed)
        listed = listed_in(params)
        groups = groups_of(listed)
        stand_ins = first_stand_ins(parameters_in(groups))
        if dtype is not None:
            must_not_be_wide(stand_ins if model is None else model.parameters())
        in_place = as_given(listed, in_place_of(groups, stand_ins))
        wrapped = Wrapped(optimizer_class, in_place, kwargs, stand_ins)
        groups, state = wrapped.first(stand_ins, names_in(groups))
        super().__init__(groups, wrapped.defaults)
        # Once nothing else can be refused.
        wide = self._cast(stand_ins, model, keep_fp32, cast_buffers)
        self._wrapped = wrapped
        self._begin(stand_ins, wide, state)
        share(self._entries_of)

    # The interface of every optimizer.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``Optimizer.add_param_group`` does, and cast its float32 parameters.

        Parameters of the model that ``keep_fp32`` named stay float32.

        Raises:
            ParameterError: a parameter cannot be cast without its model; nothing changes.
        """
        if self._wrapped is None:  # the base class' constructor is adding the first groups
            super().add_param_group(param_group)
            return
        groups = groups_of([param_group])
        stand_ins = first_stand_ins(parameters_in(groups))
        self._checked({**groups[0]})
        added, state = self._wrapped.add(
            in_place_of(groups, stand_ins),
            stand_ins,
            names_in(groups),
            self.param_groups,
            self.state,
        )
        added = [self._checked(group) for group in added]
        values = {parameter: parameter.data for parameter in stand_ins}
        try:
            wide = self._cast(stand_ins, None, (), ())
            self._begin(stand_ins, wide, state, len(parameters_of(self)))
            # Last, and in one call, so that an interrupt adds all of it or nothing.
            self.param_groups.extend(added)
        except BaseException:
            if all(each is not added[0] for each in self.param_groups):
                self._undo(values)
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the float32 values of all parameters that have gradients, and round them.

        The optional ``closure`` is called once, before the step. A scaler passes its flag, its
        scale and the clip coefficient in attributes. If the flag is set, nothing changes.

        Returns:
            The result of the closure; None without one.
        """
        assert self._wrapped is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        coefficient = self.clip_coefficient
        if found_inf is not None and not self._may_skip_on_device(found_inf):
            if found_inf:
                return loss
            if self._wrapped.is_pytorch_s or not self._wrapped.takes_scaled:
                found_inf = None
        factor = coefficient
        if scale is not None and self._wrapped.takes_scaled:
            scale, factor = scale if coefficient is None else scale / coefficient, None
        elif scale is not None:
            inverse = _OPERATIONS.inverse(scale)[1]
            scale, factor = None, inverse if coefficient is None else coefficient * inverse
        self._call("step", factor, scale, found_inf)
        return loss

    @torch.no_grad()
    def train(self) -> None:
        """Call the wrapped optimizer's ``train``, which those of Schedule-Free have, if it has one.

        It moves the float32 values, as a step does.
        """
        self._set_mode("train")

    @torch.no_grad()
    def eval(self) -> None:
        """Call the wrapped optimizer's ``eval``, if it has one. See :meth:`train`."""
        self._set_mode("eval")

    def _set_mode(self, method: str) -> None:
        assert self._wrapped is not None
        if self._wrapped.has(method):
            self._call(method)

    def state_dict(self) -> dict[str, Any]:
        """The state dict, with the state of the wrapped optimizer and of the store.

        The store adds one key to a parameter's state: "master" for "float32", "remainder" for
        "remainder16", and "rounding" for "stochastic". Save the state dict, or copy it, before the
        next step, which changes those of its tensors that are not copies.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = self._packed()
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, with any store, or of the wrapped class.

        If it is from another store, a parameter's next step converts the entry to this store. So
        the model may be loaded before the optimizer or after it. A parameter without an entry
        starts from its 16-bit value.

        Raises:
            ValueError: the number of groups or parameters differs, a group repeats a parameter, or
                an entry of a store has another shape or values out of range; nothing changes.
            TypeError: an entry of a store is not a tensor of its kind; nothing changes.
        """
        assert self._wrapped is not None
        loaded = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        # torch.distributed.checkpoint identifies parameters by names instead of numbers.
        numbers = numbers_of(loaded["param_groups"])
        given = loaded["state"]
        rest = {i: without_entries(given[i]) if i in numbers else given[i] for i in given}
        states, others, groups = self._wrapped.load(self.param_groups, {**loaded, "state": rest})
        new: defaultdict[Any, dict[str, Any]] = defaultdict(dict, others)
        for p, i, state in zip(parameters_of(self), numbers, states, strict=True):
            state.update(entries_in(given.get(i, {}), i, p))
            if state:
                new[p] = state
        groups = [
            {**own, **group, "params": own["params"]}
            for own, group in zip(self.param_groups, groups, strict=True)
        ]
        self._join(new)
        emptied = self._entries.emptied()
        # In one statement without a call, which nothing interrupts. The chunks hold old states.
        self.state, self.param_groups, self._entries, self._chunks = new, groups, emptied, None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        state = defaultdict(dict, {p: separate(each) for p, each in dict(self.state).items()})
        own = {name: getattr(self, name) for name in _PICKLED}
        return {**super().__getstate__(), **own, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join(self.state)
        if self._fp32_gradients:  # a copied or unpickled parameter loses its grad_dtype
            _take_float32_gradients(parameters_of(self))
        share(self._entries_of)

    # The interface for float32 values and gradients.

    @torch.no_grad()
    def wide(self, parameter: torch.Tensor) -> torch.Tensor:
        """The float32 values of a 16-bit parameter; for another parameter, its own values.

        Returns:
            A new tensor with the parameter's shape and layout.

        Raises:
            KeyError: the tensor is not one of this optimizer's parameters.
        """
        if parameter not in self.state and all(p is not parameter for p in parameters_of(self)):
            raise KeyError("the tensor is not one of this optimizer's parameters")
        if parameter.dtype not in DTYPES:
            return parameter.detach().clone()
        return self._entries.wide(parameter, self.state)

    @torch.no_grad()
    def widen_gradients_(self) -> None:
        """Convert 16-bit gradients to float32, so that they can be unscaled before the step.

        Dividing float16 gradients by the loss scale would flush many of them to zero. gradscaler's
        own ``unscale_`` calls this method, so a call of
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` may follow it. The
        ``unscale_`` of ``torch.amp.GradScaler`` refuses float16 gradients, so call this method
        before it. The gradients take 4 bytes per parameter until they are set to None.

        Raises:
            ValueError: this PyTorch has no ``Tensor.grad_dtype``, so a gradient must have its
                parameter's dtype.
        """
        for parameter in parameters_of(self):
            grad = parameter.grad
            if grad is None or grad.dtype not in DTYPES:
                continue
            _must_have_grad_dtype("unscale_()")
            wide = grad.float()
            parameter.grad = None
            parameter.grad_dtype = None  # allows any dtype: the next backward pass makes 16 bits
            parameter.grad = wide

    # The step.

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group, checked and completed as ``Optimizer.add_param_group`` does, but not added."""
        checking: Any = SimpleNamespace(defaults=self.defaults, param_groups=[*self.param_groups])
        torch.optim.Optimizer.add_param_group(checking, group)
        checked: dict[str, Any] = checking.param_groups[-1]
        return checked

    def _packed(self) -> dict[str, Any]:
        """The state dict, as PyTorch packs it, without a parameter that is just being added."""
        groups, entries, state = self.param_groups, self._entries, self.state  # of one moment
        groups = [*groups]
        places = places_in(groups)
        numbered = {
            places[key][1] if key in places else key: separate(value) if key in places else value
            for key, value in entries.saved(state).items()
            if key in places or not isinstance(key, torch.Tensor)
        }
        packed = {
            "state": numbered,
            "param_groups": [
                {**group, "params": [places[p][1] for p in group["params"]]} for group in groups
            ],
        }
        assert self._wrapped is not None
        saved = self._wrapped.saved(groups, state)
        if saved is None:
            return packed
        for key, own in saved.get("state", {}).items():  # beside the store's entries
            before = numbered.get(key)
            kept = {k: before[k] for k in KEYS if k in before} if isinstance(before, dict) else {}
            numbered[key] = {**own, **kept} if kept else own
        return {**packed, **saved, "state": numbered}

    def _call(
        self,
        method: str,
        factor: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Call a method of the wrapped optimizer for all chunks of parameters.

        Args:
            method: the name of the method.
            factor: the factor of the gradients, applied here; None for 1.
            scale: the divisor of the gradients, applied by the wrapped optimizer; None for 1.
            found_inf: the flag by which the wrapped optimizer skips; None for no skip.
        """
        assert self._wrapped is not None
        if self._wrapped.is_pytorch_s:
            parameters = [p for p in parameters_of(self) if p.grad is not None]
            if not parameters:
                return
        else:
            parameters = [p for p in parameters_of(self) if self._has_values(p)]
        places = places_in(self.param_groups)
        chunks = self._chunks_of(parameters, places)
        with chunks.memory():
            for chunk in chunks.chunks or [[]]:
                self._call_chunk(method, chunk, places, factor, scale, found_inf)

    def _has_values(self, parameter: torch.Tensor) -> bool:
        """Whether a class of others may use a parameter's values: not if it was never trained."""
        if parameter.requires_grad or parameter.grad is not None or parameter.dtype not in DTYPES:
            return True
        return bool(self.state.get(parameter) or self._entries.of(parameter, self.state))

    def _call_chunk(
        self,
        method: str,
        chunk: list[Piece],
        places: Places,
        factor: torch.Tensor | None,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Call a method of the wrapped optimizer for the pieces of a chunk.

        Args:
            method: the name of the method.
            chunk: the pieces.
            places: the places of all parameters in their groups.
            factor: the factor of the gradients, applied here; None for 1.
            scale: the divisor of the gradients, applied by the wrapped optimizer; None for 1.
            found_inf: the flag by which the wrapped optimizer skips; None for no skip.
        """
        assert self._wrapped is not None
        stand_ins: StandIns = {}
        gradients: list[torch.Tensor | None] = []
        for piece in chunk:
            piece.look_up()
            if piece.is_narrow:
                values = self._entries.open(piece, self.state, places)
            else:
                piece.lend([self.state.get(p, {}) for p in piece.parameters])
                values = piece.spans([p.detach() for p in piece.parameters])
            stand_ins.update(zip(piece.stepped, values, strict=True))
            if piece.has_gradients:
                gradients += map(like, piece.stepped, piece.widened_gradients(factor))
            else:
                gradients += [None for _ in values]
        narrow = [piece for piece in chunk if piece.is_narrow]
        try:
            for stand_in, gradient in zip(stand_ins.values(), gradients, strict=True):
                stand_in.grad = gradient
            if not chunk or chunk[0].lent is None:
                self._wrapped.call(
                    method, self.param_groups, places, stand_ins, self.state, scale, found_inf
                )
            else:
                self._step_flat(chunk[0], places, stand_ins, scale, found_inf)
            for piece in narrow:
                self._entries.close(piece)
            _clear_gradients(stand_ins)
        except BaseException:  # an interrupt, too: the masters and the parameters must agree
            for piece in narrow:
                self._entries.keep(piece)
            _clear_gradients(stand_ins)
            raise

    def _step_flat(
        self,
        piece: Piece,
        places: Places,
        stand_ins: StandIns,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Step the flat tensor of a piece, which is alone in its chunk."""
        assert self._wrapped is not None
        assert piece.lent is not None
        first = piece.parameters[0]
        stepped = {first: dict(piece.lent)}
        try:
            self._wrapped.call(
                "step", self.param_groups, places, stand_ins, stepped, scale, found_inf
            )
            piece.take_back(stepped[first], self.state)
        except BaseException:  # the call of take_back() may have been interrupted, too
            piece.take_back(stepped[first], self.state)
            raise

    def _may_skip_on_device(self, found_inf: object) -> bool:
        """Whether the step may run without reading the flag, so that the host need not wait.

        False for a random store, because a skipped step must not draw random numbers.
        """
        assert self._wrapped is not None
        on_device = isinstance(found_inf, torch.Tensor) and not found_inf.is_cpu
        is_random = self._entries.store.is_random
        return on_device and self._wrapped.skips_on_device and not is_random

    def _chunks_of(self, parameters: list[torch.Tensor], places: Places) -> Chunks:
        """The chunks of these parameters, reused from the previous step if nothing changed."""
        assert self._wrapped is not None
        size = self._size(parameters)
        to_split = [p for p in parameters if size and p.numel() > size and self._may_split(p)]
        layouts = [
            (id(p), places[p][0], p.dtype, p.device, p.shape, p.stride()) for p in parameters
        ]
        missing = [] if self._wrapped.is_pytorch_s else [p.grad is None for p in parameters]
        key = layouts, list(map(id, to_split)), missing
        if self._chunks is None or self._chunks[0] != key:
            self._entries.lay_out(parameters, self.state)
            has_values = self._entries.store.has_values
            to_join = self._to_join(parameters, places)
            self._chunks = key, Chunks(parameters, size, to_split, to_join, not has_values)
        return self._chunks[1]

    def _size(self, parameters: list[torch.Tensor]) -> int | None:
        """The largest number of elements of a chunk; None for all elements."""
        assert self._wrapped is not None
        if self._chunk_elements is None and self._wrapped.is_pytorch_s and parameters:
            return _ON_CPU if parameters[0].is_cpu else _ELSEWHERE
        return self._chunk_elements

    def _to_join(self, parameters: list[torch.Tensor], places: Places) -> list[list[torch.Tensor]]:
        """Lists of parameters, of one chunk each, that may be stepped as one flat tensor.

        A parameter with more elements than a chunk is in none. So the lists are the same before
        such parameters are split and after.
        """
        size = self._size(parameters)
        alike: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
        for p in parameters:
            if (size is None or p.numel() <= size) and self._may_join(p):
                alike[places[p][0], p.dtype].append(p)
        runs = (run for each in alike.values() for run in chunked(each, size))
        return [run for run in runs if len(run) > 1]

    def _may_join(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter can be stepped in one flat tensor with others.

        Joined parameters fill registers, so that each element is rounded as if it were not joined.
        """
        assert self._wrapped is not None
        return (
            self._wrapped.is_elementwise
            and parameter.dtype in DTYPES
            and parameter.is_cpu
            and type(parameter.detach()) is torch.Tensor
            and parameter.numel() % REGISTER == 0 < parameter.numel()
            and is_dense(parameter)
        )

    def _may_split(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter can be stepped in spans. Its first step makes its state, in one."""
        assert self._wrapped is not None
        grad, state = parameter.grad, self.state.get(parameter, {})
        of_optimizer = without_entries(state).values()
        entries = self._entries.of(parameter, self.state)
        return (
            self._wrapped.is_elementwise
            and bool(of_optimizer)
            and all(
                _has_layout(value, parameter)
                or not isinstance(value, torch.Tensor)
                or not value.dim()
                for value in of_optimizer
            )
            and _has_layout(grad, parameter)
            and all(_has_layout(e, parameter) for key, e in entries.items() if key != "rounding")
            and is_dense(parameter)
        )

    @torch.no_grad()
    def _join(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Join the tensors of a state that was just loaded or copied, as steps join them."""
        parameters = [p for p in parameters_of(self) if p.requires_grad and p in state]
        self._entries.lay_out(parameters, state)
        of_other_stores = {*KEYS} - {self._entries.store.key}  # the next steps convert these
        for run in self._to_join(parameters, places_in(self.param_groups)):
            layout = Layout([p.detach() for p in run])
            Joined(layout, len(run)).join([state[p] for p in run], without=of_other_stores)

    # Casting and first state.

    def _cast(
        self,
        parameters: Iterable[torch.Tensor],
        model: torch.nn.Module | None,
        keep_fp32: Chosen,
        cast_buffers: Chosen,
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Cast parameters, and return the float32 values of those that require gradients."""
        named = [] if model is None else list(model.named_parameters())
        together = [*(p for _, p in named), *parameters_of(self), *parameters]
        must_not_overlap(together, {id(p): name for name, p in named})
        if self._fp32_gradients:
            _must_have_grad_dtype("fp32_gradients")
            if any(map(is_dtensor, parameters)):
                raise ParameterError(
                    "fp32_gradients does not work with sharded parameters, to which FSDP assigns "
                    "gradients of their own dtype: leave it out"
                )
        wide = {}
        if self._dtype is not None:
            kept = chosen_in(model, "keep_fp32", keep_fp32) | set(map(id, self._kept))
            buffers = chosen_in(model, "cast_buffers", cast_buffers)
            wide = cast(parameters, model, self._dtype, kept, buffers)
            if model is not None:
                self._kept = [p for p in model.parameters() if id(p) in kept]
        if self._fp32_gradients:
            _take_float32_gradients(parameters)
        return wide

    @torch.no_grad()
    def _begin(
        self,
        stand_ins: StandIns,
        wide: dict[torch.Tensor, torch.Tensor],
        state: dict[torch.Tensor, dict[str, Any]],
        first: int = 0,
    ) -> None:
        """Add the state of new parameters, and keep their float32 values.

        ``first`` is the index of the first one among all parameters.
        """
        self.state.update(
            (p, state[tensor]) for p, tensor in stand_ins.items() if state.get(tensor)
        )
        self.state.update(of_no_parameter(state))
        for i, parameter in enumerate(stand_ins, first):
            if parameter in wide:
                self._entries.add(parameter, wide.pop(parameter), i)

    @torch.no_grad()
    def _entries_of(self, parameters: Collection[int]) -> list[torch.Tensor]:
        """The store's entries of those 16-bit parameters whose ids are given."""
        return [
            self._entries.local(p, self.state, i)
            for i, p in enumerate(parameters_of(self))
            if id(p) in parameters and p.dtype in DTYPES
        ]

    def _undo(self, values: StandIns) -> None:
        """Set parameters that were not added back to the tensors that they had."""
        for parameter, value in values.items():
            self.state.pop(parameter, None)
            self._entries.drop(parameter)
            if parameter.dtype is not value.dtype:
                parameter.data = value


_PICKLED = "_wrapped", "_entries", "_dtype", "_chunk_elements", "_fp32_gradients", "_kept"


def _clear_gradients(stand_ins: StandIns) -> None:
    """Remove the gradients of stand-ins, because masters are kept, and gradients are not."""
    for stand_in in stand_ins.values():
        stand_in.grad = None


def _has_layout(value: object, parameter: torch.Tensor) -> bool:
    """Whether it is a tensor with one element for each of a parameter's, in the same order."""
    return (
        isinstance(value, torch.Tensor)
        and not is_dtensor(value)
        and value.layout is torch.strided
        and value.shape == parameter.shape
        and value.stride() == parameter.stride()
    )


def _take_float32_gradients(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.dtype in DTYPES:
            parameter.grad_dtype = torch.float32


def _must_have_grad_dtype(what: str) -> None:
    if not _HAS_GRAD_DTYPE:
        raise Fp16GradientsError(
            f"{what} needs float32 gradients of 16-bit parameters, which PyTorch "
            f"{torch.__version__} does not have: leave it out, and clip by "
            "scaler.clip_grad_norm_(optimizer, max_norm)"
        )
