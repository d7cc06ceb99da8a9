"""The wrapped optimizer, which gets float32 tensors in place of 16-bit parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from gradscaler.errors import ParameterError
from gradscaler.torch._weights.chunks import REGISTER
from gradscaler.torch._weights.lasting import (
    Group,
    Lasting,
    StandIns,
    address_of,
    as_stepped,
    stand_in_of,
)
from gradscaler.torch._weights.stores import KEYS

Places = dict[torch.Tensor, tuple[int, int]]
"""The place of each parameter: its group's index, and its own index among all parameters."""

State = dict[Any, dict[str, Any]]
Names = Mapping[torch.Tensor, str]

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
    """An optimizer that holds values, gradients and state only during a call.

    So it keeps no float32 tensor alive. A step of PyTorch's classes may be given only some of the
    parameters, in any tensors. Another class may have its own way to find what belongs to a
    parameter, or compare parameters. So each of its calls gets all of them, in :class:`Lasting`
    tensors.

    Args:
        optimizer_class: the class of the optimizer.
        given: the optimizer's parameters or groups, with tensors that stand in for parameters.
        kwargs: the optimizer's other arguments.
        stand_ins: these tensors by parameter.

    Attributes:
        defaults: the optimizer's defaults.
        takes_scaled: whether the optimizer takes ``grad_scale`` and ``found_inf``. A class of
            others may also need a ``found_inf`` of 0.
        skips_on_device: whether it skips by ``found_inf`` on the device, so that no other code must
            read the flag before a step.
        is_pytorch_s: whether the class is PyTorch's own.
        is_elementwise: whether an element's step depends on no other element of its parameter, so
            that a parameter can be stepped in spans.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        given: list[Any],
        kwargs: Mapping[str, Any],
        stand_ins: StandIns,
    ) -> None:
        self._optimizer: Any = optimizer_class(given, **kwargs)
        _must_not_hold(self._optimizer, stand_ins)
        self.defaults: dict[str, Any] = self._optimizer.defaults
        self.takes_scaled = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))
        # If SGD's first step is skipped on the device, it leaves its momentum uninitialized.
        self.skips_on_device = self.takes_scaled and not isinstance(
            self._optimizer, torch.optim.SGD
        )
        self.is_pytorch_s = _is_pytorch_s(optimizer_class)
        self.is_elementwise = optimizer_class in _ELEMENTWISE
        self._lasting = None if self.is_pytorch_s else Lasting()

    def first(self, stand_ins: StandIns, names: Names) -> tuple[list[Group], dict[Any, Any]]:
        """The groups and the state that the optimizer's constructor has made.

        Returns:
            The groups, with parameters in place of stand-ins, and with their names. The state is
            that of stand-ins.

        Raises:
            ParameterError: the groups hold other tensors.
        """
        try:
            return self._made(0, stand_ins, names)
        finally:
            self._clear()

    def add(
        self,
        given: list[Group],
        stand_ins: StandIns,
        names: Names,
        groups: list[Group],
        state: State,
    ) -> tuple[list[Group], dict[Any, Any]]:
        """Add the given groups to those that there are, and return them as :meth:`first` does."""
        try:
            if self._lasting is not None:
                self._optimizer.param_groups = self._lasting.put(groups, {})
                self._lend(self._lasting.tensors, state)
            begin = len(self._optimizer.param_groups)
            for group in given:
                self._optimizer.add_param_group(group)
            _must_not_hold(self._optimizer, stand_ins)
            return self._made(begin, stand_ins, names)
        finally:
            self._clear()

    def call(
        self,
        method: str,
        groups: list[Group],
        places: Places,
        stand_ins: StandIns,
        state: State,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Call a method of the optimizer, such as ``step``, on values that stand in for parameters.

        Args:
            method: the name of the method.
            groups: the groups of the parameters. Values that the optimizer changes in its groups
                are copied back to them.
            places: the places of the parameters in the groups.
            stand_ins: the values, which the optimizer changes in place, with gradients. All must
                have gradients if the class is PyTorch's.
            state: the optimizer's state by parameter; it changes in place. The optimizer does not
                see a store's entries in it, which stay there meanwhile.
            scale: the divisor of the gradients, applied by the optimizer; None for 1.
            found_inf: the flag by which the optimizer skips; None for no skip.
        """
        pairs: list[tuple[Group, Group]] = []
        tensors: StandIns = {}
        is_finished, is_right = False, True

        def begin() -> None:
            nonlocal pairs, tensors
            pairs, tensors = self._put(groups, places, stand_ins)
            self._optimizer.param_groups = [inner for _, inner in pairs]
            self._lend(tensors, state)
            if scale is not None:
                self._optimizer.grad_scale = scale
            if found_inf is not None:
                self._optimizer.found_inf = found_inf
            getattr(self._optimizer, method)()

        def finish() -> None:
            nonlocal is_finished, is_right
            if not is_finished and tensors:
                is_right = self._take_back(stand_ins, tensors, state)
                for group, inner in pairs:
                    group.update((key, value) for key, value in inner.items() if key != "params")
                is_finished = True  # the tensors lose their memory now
            self._clear()

        try:
            begin()
            finish()
        except BaseException:  # the call of finish() may have been interrupted, too
            finish()
            raise
        if not is_right:
            raise ParameterError(
                f"{type(self._optimizer).__name__} has set a frozen parameter of 16 bits that was "
                "never trained, whose float32 values MasterWeights does not keep: leave frozen "
                "parameters out of the groups"
            )

    def load(
        self, groups: list[Group], state_dict: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[Any, Any], list[Group]]:
        """Load a state dict by the optimizer's own method.

        That method casts a state's tensors to the dtype of its parameter. The parameters are
        therefore replaced by empty tensors of the dtype that is stepped.

        Returns:
            The state of each parameter, the state that belongs to no parameter, and the groups.
        """
        try:
            if self._lasting is None:
                self._optimizer.param_groups = [
                    {**group, "params": list(map(_empty_like, group["params"]))} for group in groups
                ]
            else:
                self._optimizer.param_groups = self._lasting.put(groups, {})
            tensors = parameters_in(self._optimizer.param_groups)
            self._optimizer.load_state_dict(state_dict)
            state = self._optimizer.state
            states = [state.get(tensor, {}) for tensor in tensors]
            return states, of_no_parameter(state), self._optimizer.param_groups
        finally:
            self._clear()

    def saved(self, groups: list[Group], state: State) -> dict[str, Any] | None:
        """What the optimizer's own ``state_dict`` saves; None if that is PyTorch's.

        It may be called at any moment of a step, so a copy of the optimizer is asked.
        """
        if self._lasting is None:
            return None
        optimizer: Any = object.__new__(type(self._optimizer))
        vars(optimizer).update(vars(self._optimizer))
        tensors = {p: _empty_like(p) for group in groups for p in group["params"]}
        optimizer.param_groups = [
            {**group, "params": [tensors[p] for p in group["params"]]} for group in groups
        ]
        optimizer.state = _lent(tensors, state)
        optimizer.state.update(of_no_parameter(state))
        saved: dict[str, Any] = optimizer.state_dict()
        return saved

    def has(self, method: str) -> bool:
        """Whether the optimizer has a method of this name."""
        return callable(getattr(self._optimizer, method, None))

    def _made(
        self, begin: int, stand_ins: StandIns, names: Names
    ) -> tuple[list[Group], dict[Any, Any]]:
        groups: list[Group] = self._optimizer.param_groups[begin:]
        parameter_of = {id(tensor): p for p, tensor in stand_ins.items()}
        if {id(each) for group in groups for each in group["params"]} != parameter_of.keys():
            raise ParameterError(
                f"{type(self._optimizer).__name__} steps other tensors than those that it is "
                "given, and MasterWeights cannot step them in float32: give it exactly the "
                "parameters that it steps"
            )
        if self._lasting is not None:
            self._lasting.add(stand_ins, groups)
        members = [[parameter_of[id(each)] for each in group["params"]] for group in groups]
        made = [
            {**group, "params": [(names[p], p) if p in names else p for p in own]}
            for group, own in zip(groups, members, strict=True)
        ]
        return made, self._optimizer.state

    def _lend(self, tensors: StandIns, state: State) -> None:
        """Give the optimizer the state of stand-ins, without a store's entries."""
        self._optimizer.state = _lent(tensors, state)
        if self._lasting is not None:  # PyTorch's have no such state
            self._optimizer.state.update(of_no_parameter(state))

    def _put(
        self, groups: list[Group], places: Places, stand_ins: StandIns
    ) -> tuple[list[tuple[Group, Group]], StandIns]:
        """The groups that the optimizer shall see beside the parameters', and the tensors there."""
        if self._lasting is None:
            return _some_of(groups, places, stand_ins), stand_ins
        inner = self._lasting.put(groups, stand_ins)
        return list(zip(groups, inner, strict=True)), self._lasting.tensors

    def _take_back(self, stand_ins: StandIns, tensors: StandIns, state: State) -> bool:
        """Copy the optimizer's state to that of the parameters, beside a store's entries.

        Returns:
            Whether only parameters with stand-ins were set.
        """
        is_right = True
        if self._lasting is not None:
            is_right = self._lasting.take_back(stand_ins, vars(self._optimizer))
        own = self._optimizer.state
        for p, tensor in tensors.items():
            if tensor in own:
                entries = {key: e for key, e in state.get(p, {}).items() if key in KEYS}
                state[p] = {**own[tensor], **entries}
        state.update(of_no_parameter(own))
        return is_right

    def _clear(self) -> None:
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)
        for name in {"grad_scale", "found_inf"} & vars(self._optimizer).keys():
            delattr(self._optimizer, name)
        if self._lasting is not None:
            self._lasting.release()


def check(
    optimizer_class: object, kwargs: Mapping[str, object], chunk_elements: int | None
) -> None:
    """Refuse an optimizer that cannot be wrapped.

    Raises:
        TypeError: ``optimizer_class`` is not the class of an optimizer.
        ParameterError: the optimizer needs a closure, is MasterWeights itself, should be
            differentiable, or cannot step chunks of this size.
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
    if chunk_elements is None:
        return
    if kwargs.get("fused") and chunk_elements < REGISTER:
        raise ParameterError(
            f"chunk_elements is {chunk_elements}, and fused kernels round fewer than {REGISTER} "
            f"elements in another way: give at least {REGISTER}"
        )
    if not _is_pytorch_s(optimizer_class):
        raise ParameterError(
            f"chunk_elements is {chunk_elements}, and {optimizer_class.__name__}, which is not "
            "PyTorch's, must get all parameters in each step: leave it out"
        )


def _is_pytorch_s(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    return f"{optimizer_class.__module__}.".startswith("torch.optim.")


def first_stand_ins(parameters: list[torch.Tensor]) -> StandIns:
    """The tensors that stand in for parameters while the optimizer is constructed."""
    return {p: stand_in_of(p) for p in parameters}


def places_in(groups: list[Group]) -> Places:
    """The places of all parameters in their groups."""
    of_group = ((p, g) for g, group in enumerate(groups) for p in group["params"])
    return {p: (g, i) for i, (p, g) in enumerate(of_group)}


def listed_in(params: Iterable[object]) -> list[object]:
    """The parameters or groups that an optimizer is given."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got a tensor")
    return list(params)


def groups_of(given: list[Any]) -> list[Group]:
    """Convert an optimizer's parameters or groups to groups, each with a new list."""
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


def names_in(groups: list[Group]) -> dict[torch.Tensor, str]:
    """The names that the parameters of groups come with."""
    names = {}
    for group in groups:
        given = group.get("param_names") or [None] * len(group["params"])
        for name, each in zip(given, group["params"], strict=True):
            if isinstance(each, tuple):
                names[each[1]] = each[0]
            elif name is not None:
                names[each] = name
    return names


def in_place_of(groups: list[Group], stand_ins: StandIns) -> list[Group]:
    """Copies of groups, with the tensors that stand in for their parameters."""
    unnamed = ({k: v for k, v in group.items() if k != "param_names"} for group in groups)
    return [
        {**group, "params": [stand_ins[p] for p in parameters_in([group])]} for group in unnamed
    ]


def as_given(given: list[Any], in_place: list[Group]) -> list[Any]:
    """Groups of stand-ins, or the list of these if a list of parameters was given."""
    has_groups = not given or isinstance(given[0], dict)
    return in_place if has_groups else in_place[0]["params"]


def without_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a parameter's state that belongs to the optimizer."""
    return {key: value for key, value in state.items() if key not in KEYS}


def of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The part of an optimizer's state that belongs to no parameter, such as a count of steps."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def _must_not_hold(optimizer: torch.optim.Optimizer, stand_ins: StandIns) -> None:
    """ParameterError if a step may use tensors or gradients that it does not find in its groups."""
    ids = {id(tensor) for tensor in stand_ins.values()}
    addresses = {*map(address_of, stand_ins.values())} - {None, 0}  # 0: without memory
    others = [{k: v for k, v in each.items() if k != "params"} for each in optimizer.param_groups]
    held = {
        **{name: each for name, each in vars(optimizer).items() if name != "defaults"},
        "param_groups": others,
        "state": list(optimizer.state.values()),
    }
    for name, value in held.items():
        if any(id(each) in ids or address_of(each) in addresses for each in _tensors_in(value)):
            raise ParameterError(
                f"{type(optimizer).__name__} keeps parameters in its attribute {name!r}, and "
                "MasterWeights steps other tensors in their place: let its step read param_groups"
            )
    if any(map(_has_hooks, stand_ins.values())):
        raise ParameterError(
            f"{type(optimizer).__name__} registers hooks on its parameters, and MasterWeights "
            "steps other tensors in their place, for which no backward pass calls hooks: use an "
            "optimizer that takes gradients in its step"
        )


def _has_hooks(tensor: torch.Tensor) -> bool:
    # PyTorch before 2.1 has no hooks of the second kind.
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    return any(getattr(tensor, name, None) for name in names)


def _some_of(groups: list[Group], places: Places, stand_ins: StandIns) -> list[tuple[Group, Group]]:
    """The groups that have stand-ins, each with a group of these."""
    placed = sorted(((places[p], tensor) for p, tensor in stand_ins.items()), key=itemgetter(0))
    return [
        (groups[g], {**groups[g], "params": [tensor for _, tensor in members]})
        for g, members in groupby(placed, lambda each: each[0][0])
    ]


def _lent(tensors: StandIns, state: State) -> defaultdict[Any, dict[str, Any]]:
    """The state of parameters as that of stand-ins, without a store's entries."""
    own = ((tensor, without_entries(state.get(p, {}))) for p, tensor in tensors.items())
    return defaultdict(dict, {tensor: each for tensor, each in own if each})


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor without elements, in the dtype in which a parameter is stepped."""
    return as_stepped(torch.empty(0, dtype=parameter.dtype, device=parameter.device))


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Find the tensors in lists, tuples and dicts, and the parameters of an optimizer."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors_in(value.param_groups)
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)
