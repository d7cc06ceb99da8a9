"""The wrapped optimizer, which gets float32 tensors in place of 16-bit parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from gradscaler._on_torch.processes import to_local
from gradscaler.errors import ParameterError
from gradscaler.torch._weights.rounding import DTYPES
from gradscaler.torch._weights.stores import KEYS

Group = dict[str, Any]

StandIns = dict[torch.Tensor, torch.Tensor]
"""The tensor that stands in for each parameter while the wrapped optimizer is called."""


Places = dict[torch.Tensor, tuple[int, int]]
"""The place of each parameter: its group's index, and its own index among all parameters."""

_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


class Wrapped:
    """An optimizer that holds parameters and state only during a call.

    So it keeps no float32 tensor alive, and a step can be given only some of the parameters.

    Args:
        optimizer_class: the class of the optimizer.
        groups: the groups, with the tensors that first stand in for the parameters.
        kwargs: the optimizer's other arguments.

    Attributes:
        defaults: the optimizer's defaults.
        takes_scaled: whether the optimizer takes ``grad_scale`` and ``found_inf``.
        skips_on_device: whether it skips by ``found_inf`` on the device, so that no other code must
            read the flag before a step.
        is_pytorch_s: whether the class is PyTorch's own. Another class may compare parameters with
            each other, so its step gets all of them at once. It may also need a ``found_inf`` of 0.
        is_elementwise: whether an element's step depends on no other element of its parameter, so
            that a parameter can be stepped in spans.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: list[Group],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._optimizer: Any = optimizer_class(groups, **kwargs)
        _must_not_hold(self._optimizer, groups)
        self.defaults: dict[str, Any] = self._optimizer.defaults
        self.takes_scaled = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))
        # If SGD's first step is skipped on the device, it leaves its momentum uninitialized.
        self.skips_on_device = self.takes_scaled and not isinstance(
            self._optimizer, torch.optim.SGD
        )
        self.is_pytorch_s = optimizer_class.__module__.startswith("torch.optim.")
        self.is_elementwise = optimizer_class in _ELEMENTWISE

    def first_state(self, *groups: Group) -> dict[torch.Tensor, dict[str, Any]]:
        """Add groups, and return the state that the optimizer makes before its first step."""
        try:
            for group in groups:
                self._optimizer.add_param_group(group)
            state: dict[torch.Tensor, dict[str, Any]] = self._optimizer.state
            return state
        finally:
            self._clear()

    def step(
        self,
        groups: list[Group],
        places: Places,
        stand_ins: StandIns,
        state: dict[torch.Tensor, dict[str, Any]],
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Step the tensors that stand in for parameters. All of them have gradients.

        Args:
            groups: the groups of the parameters. Values that the optimizer changes in its groups
                are copied back to them.
            places: the places of the parameters in the groups.
            stand_ins: the tensors to step in place of the parameters.
            state: the optimizer's state by parameter; it changes in place. The optimizer does not
                see a store's entries in it, which stay there meanwhile.
            scale: the divisor of the gradients, applied by the optimizer; None for 1.
            found_inf: the flag by which the optimizer skips; None for no skip.
        """
        placed = sorted(((places[p], tensor) for p, tensor in stand_ins.items()), key=itemgetter(0))
        pairs = [
            (groups[g], {**groups[g], "params": [tensor for _, tensor in members]})
            for g, members in groupby(placed, lambda each: each[0][0])
        ]

        def step() -> None:
            self._optimizer.param_groups = [inner for _, inner in pairs]
            self._lend(stand_ins, state)
            if scale is not None:
                self._optimizer.grad_scale = scale
            if found_inf is not None:
                self._optimizer.found_inf = found_inf
            self._optimizer.step()

        def finish() -> None:
            self._take_back(stand_ins, state)
            for group, inner in pairs:
                group.update((key, value) for key, value in inner.items() if key != "params")
            self._clear()

        try:
            step()
            finish()
        except BaseException:  # the call of finish() may have been interrupted, too
            finish()
            raise

    def load(
        self, groups: list[Group], state_dict: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[Any, Any], list[Group]]:
        """Load a state dict by the optimizer's own method.

        That method casts a state's tensors to the dtype of its parameter. The parameters are
        therefore replaced by empty tensors of the dtype that is stepped.

        Returns:
            The state of each parameter, the state that belongs to no parameter, and the groups.
        """
        tensors = [
            _as_stepped(torch.empty(0, dtype=p.dtype, device=p.device))
            for group in groups
            for p in group["params"]
        ]
        rest = iter(tensors)
        self._optimizer.param_groups = [
            {**group, "params": [next(rest) for _ in group["params"]]} for group in groups
        ]
        try:
            self._optimizer.load_state_dict(state_dict)
            state = self._optimizer.state
            states = [state.get(tensor, {}) for tensor in tensors]
            return states, _of_no_parameter(state), self._optimizer.param_groups
        finally:
            self._clear()

    def _lend(self, stand_ins: StandIns, state: Mapping[Any, dict[str, Any]]) -> None:
        """Give the optimizer the state of stand-ins, without a store's entries."""
        own = ((tensor, without_entries(state.get(p, {}))) for p, tensor in stand_ins.items())
        self._optimizer.state = defaultdict(dict, {t: each for t, each in own if each})
        if not self.is_pytorch_s:  # PyTorch's have no such state
            self._optimizer.state.update(_of_no_parameter(state))

    def _take_back(self, stand_ins: StandIns, state: dict[Any, dict[str, Any]]) -> None:
        """Copy the optimizer's state to that of the parameters, beside a store's entries."""
        own = self._optimizer.state
        if not self.is_pytorch_s:
            _own(own, stand_ins)
        for p, tensor in stand_ins.items():
            if tensor in own:
                entries = {key: e for key, e in state.get(p, {}).items() if key in KEYS}
                state[p] = {**own[tensor], **entries}
        state.update(_of_no_parameter(own))

    def _clear(self) -> None:
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)
        for name in {"grad_scale", "found_inf"} & vars(self._optimizer).keys():
            delattr(self._optimizer, name)


def check(optimizer_class: object, kwargs: Mapping[str, object]) -> None:
    """Refuse an optimizer that cannot be wrapped.

    Raises:
        TypeError: ``optimizer_class`` is not the class of an optimizer.
        ParameterError: the optimizer needs a closure, is MasterWeights itself, or should be
            differentiable.
    """
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, torch.optim.Optimizer
    ):
        got = optimizer_class if isinstance(optimizer_class, type) else type(optimizer_class)
        raise TypeError(
            "MasterWeights takes the class of an optimizer and its arguments, as in "
            f"MasterWeights(torch.optim.AdamW, model, lr=1e-3), got {got.__name__}"
        )
    if hasattr(optimizer_class, "widen_gradients_"):
        raise ParameterError("MasterWeights cannot wrap itself: give the class of its optimizer")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ParameterError(
            f"{optimizer_class.__name__} evaluates a closure repeatedly in each step, and "
            "MasterWeights steps with gradients that were computed before: use an optimizer whose "
            "step needs no closure"
        )
    if kwargs.get("differentiable"):
        raise ParameterError("MasterWeights cannot be differentiated: leave out differentiable")


def first_stand_ins(parameters: list[torch.Tensor]) -> StandIns:
    """The tensors that stand in for parameters while the optimizer is constructed."""
    return {p: _as_stepped(p.detach()) for p in parameters}


def places_in(groups: list[Group]) -> Places:
    """The places of all parameters in their groups."""
    of_group = ((p, g) for g, group in enumerate(groups) for p in group["params"])
    return {p: (g, i) for i, (p, g) in enumerate(of_group)}


def groups_of(params: Iterable[object]) -> list[Group]:
    """Convert an optimizer's ``params`` to groups, each with a new list of parameters."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got a tensor")
    given = list(params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        if not isinstance(group, dict) or "params" not in group:
            raise ParameterError(
                f'a group must be a dict with its parameters under "params", got {group!r}'
            )
        inside = group["params"]
        if isinstance(inside, set):
            raise TypeError("the parameters of a group must have an order, got a set")
        inside = [inside] if isinstance(inside, torch.Tensor) else list(inside)
        groups.append({**group, "params": inside})
    return groups


def parameters_in(groups: list[Group]) -> list[torch.Tensor]:
    """The parameters of groups, without the names that they may come with."""
    given = (each for group in groups for each in group["params"])
    parameters = [each[1] if isinstance(each, tuple) else each for each in given]
    for each in parameters:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"an optimizer takes tensors, got {type(each).__name__} in params")
    return parameters


def in_place_of(groups: list[Group], stand_ins: StandIns) -> list[Group]:
    """Copies of groups, with the tensors that stand in for their parameters."""
    unnamed = ({k: v for k, v in group.items() if k != "param_names"} for group in groups)
    return [
        {**group, "params": [stand_ins[p] for p in parameters_in([group])]} for group in unnamed
    ]


def without_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a parameter's state that belongs to the optimizer."""
    return {key: value for key, value in state.items() if key not in KEYS}


def _of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The part of an optimizer's state that belongs to no parameter, such as a count of steps."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def _must_not_hold(optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
    """ParameterError if an attribute holds parameters, because a step would use outdated ones."""
    stand_ins = {id(tensor) for group in groups for tensor in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults"):
            continue
        if any(id(each) in stand_ins for each in _tensors_in(value)):
            raise ParameterError(
                f"{type(optimizer).__name__} keeps parameters in its attribute {name!r}, and "
                "MasterWeights steps other tensors in their place: let its step read param_groups"
            )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Find the tensors in lists, tuples and dicts, and the parameters of an optimizer."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors_in(value.param_groups)
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _own(state: Mapping[Any, Any], stand_ins: StandIns) -> None:
    """Copy the tensors in a state that share memory with the stand-ins or their gradients.

    That memory is reused after the step.
    """
    lent = {
        _address(tensor)
        for stand_in in stand_ins.values()
        for tensor in (stand_in, stand_in.grad)
        if tensor is not None
    } - {None}
    for stand_in in stand_ins.values():
        for key, value in state.get(stand_in, {}).items():
            if isinstance(value, torch.Tensor) and _address(value) in lent:
                state[stand_in][key] = value.detach().clone()


def _address(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None if the tensor is sparse."""
    (local,) = to_local([tensor])
    return None if local.layout is not torch.strided else local.untyped_storage().data_ptr()


def _as_stepped(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor cast to the dtype of the step: float32 for 16 bits, otherwise its own."""
    return tensor.float() if tensor.dtype in DTYPES else tensor
