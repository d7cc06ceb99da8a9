"""``paddle.amp.GradScaler`` on any device and under any autocast, implemented by the engine."""

from __future__ import annotations

import inspect
import logging
import os
from collections import defaultdict
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import paddle
from paddle.base import core
from paddle.distributed.communication.group import Group

from gradscaler._eager.decision import Order
from gradscaler._eager.gradients import Gradients, GradientScale
from gradscaler._eager.iteration import Iteration
from gradscaler._eager.operations import FoundInf, Operations, Tensor
from gradscaler._eager.retries import DEFAULT_MAX_RETRIES
from gradscaler._eager.scaler import EagerScaler
from gradscaler._formats import reading
from gradscaler._formats.layouts import (
    PADDLE_DEFAULTS,
    PADDLE_KEYS,
    read_leaves,
    read_paddle,
    write_leaves,
    write_paddle,
)
from gradscaler._formats.state_dicts import number_in, state_values
from gradscaler.outcome import Reason, StepOutcome
from gradscaler.paddle import _operations
from gradscaler.paddle._processes import (
    PaddleProcesses,
    asked_by_fleet,
    check_group,
    largest_of,
    unscaled_by_fleet,
)
from gradscaler.paddle._spelling import either_spelling, given
from gradscaler.paddle._stepping import (
    ByMinimize,
    ByStep,
    OwnUnscaler,
    PaddleGradients,
    PaddleOptimizer,
)
from gradscaler.policies import DynamicScale, Policy, State, _checks, first_scale, is_fixed
from gradscaler.policies._presets import PADDLE
from gradscaler.policies._spelling import changed, check_alone, check_policy, defaults_of, spelled

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Paddle's own names: fleet and group-sharded optimizers set and read these attributes.
_FLAGS = (
    "_temp_found_inf_value_false",
    "_temp_found_inf_fp16",
    "_temp_found_inf_bf16",
    "_temp_found_inf_fp32",
)


class _Update(NamedTuple):
    """An update that more optimizers may join before another loss is scaled.

    Attributes:
        start: the state before the update.
        optimizers: the ids of the optimizers that it counted.
        found_infs: their flags.
        amaxes: their largest gradients.
    """

    start: State
    optimizers: set[int]
    found_infs: list[FoundInf]
    amaxes: list[np.float32]


_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _run_dynamically(cls: type[T]) -> type[T]:
    """Let SOT, the tracer of ``paddle.jit.to_static``, run a class's methods untraced.

    So it does with those that the class inherits from this package. A step decides on the host,
    which a graph cannot do, and SOT fails on such code. So each call of a scaler breaks the graph,
    and SOT traces the code around it.
    """
    core.eval_frame_skip_file_prefix((_PACKAGE,))
    for base in cls.__mro__:
        if base.__module__.startswith("gradscaler."):
            for method in filter(inspect.isfunction, vars(base).values()):
                paddle.jit.marker.force_dynamic(method)
    return cls


def _static_graph_error() -> NotImplementedError:
    """The error of an enabled scaler in a static graph."""
    return NotImplementedError(
        "gradscaler.paddle.GradScaler scales losses of the dynamic graph, and this is a static "
        "graph: use paddle.amp.GradScaler there, or keep the scaler out of "
        "to_static(full_graph=True)"
    )


@_run_dynamically
class GradScaler(EagerScaler[paddle.Tensor, PaddleOptimizer], paddle.amp.GradScaler):
    """Loss scaling for Paddle's dynamic graph: a drop-in for ``paddle.amp.GradScaler``.

    It scales on every device and under every autocast dtype. Paddle's own disables itself on the
    CPU, and also if ``scale`` is first called outside float16 autocast. Each optimizer has a
    found_inf of its own. Gradients are divided by the scale that the last call of ``scale`` used.
    All updates after one loss, such as those of several calls of ``minimize``, count as one
    iteration. An overflow prints nothing; a backoff is a ``logging`` record at level DEBUG. Under
    ``paddle.jit.to_static`` each call breaks the graph and runs as in eager mode.

    Under fleet's model and pipeline parallelism ``clip_grad_norm_`` takes the norm of the whole
    model. With sharding, or data parallelism combined with another kind, ``optimizer.step``
    averages gradients, and ``clip_grad_norm_`` raises a ``ValueError``: give
    ``ClipGradByGlobalNorm`` to the optimizer instead.

    Args:
        enable: if False or None, every call passes its arguments through.
        init_loss_scaling: the scale before the first step.
        incr_ratio: multiplies the scale when it grows, > 1.
        decr_ratio: multiplies the scale when it backs off, in (0, 1).
        incr_every_n_steps: finite steps in a row before the scale grows.
        decr_every_n_nan_or_inf: non-finite steps before the scale backs off; a finite step restarts
            the count.
        use_dynamic_loss_scaling: if False the scale never moves. An overflow still skips its step,
            and ``update`` need not be called.
        policy: the rule, in place of the parameters after ``enable``: a
            :class:`gradscaler.DynamicScale`, a :class:`gradscaler.FixedScale`, a
            :class:`gradscaler.AmaxScale`, or any other :class:`gradscaler.Policy`.
        max_retries: the largest number of repetitions, by default 16, of an evaluation that
            overflows, in ``step(optimizer, closure)``, and of the body of a loop over ``attempts``.
        group: the process group that decides together whether to step, and at which scale, by one
            all-reduce a step. None takes all processes for an optimizer of fleet's hybrid
            parallelism (sharding, model, pipeline and segment), and this process alone otherwise:
            ``DataParallel`` gives all processes the same gradients. Name the group for parameters
            that only one process has, and for a loop over ``attempts``. All its processes must call
            ``step`` for the same optimizers in the same order.
        device: a parameter of PyTorch's without effect: a scaler works on every device.
        enabled, init_scale, growth_factor, backoff_factor, growth_interval: PyTorch's names of
            ``enable``, ``init_loss_scaling``, ``incr_ratio``, ``decr_ratio`` and
            ``incr_every_n_steps``. The defaults are Paddle's under either name.

    The order of positional arguments depends on the first, as in Paddle's development version. If
    it is a string or a number, the order is PyTorch's: ``GradScaler(device, init_scale,
    growth_factor, backoff_factor, growth_interval, enabled)``, or the same without ``device``. If
    it is a bool or None, the order is Paddle's. A first 0 or 1 may be ``enable`` or ``init_scale``,
    so it raises unless the other of the two is given by name.

    The defaults are those of the documentation of Paddle 2.2. Releases from 2.5 to 3.3.1 have
    65536.0, 2000 and 1 for ``init_loss_scaling``, ``incr_every_n_steps`` and
    ``decr_every_n_nan_or_inf``.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind, ``enable`` is not a bool,
            ``device`` is not a string, a parameter is given twice, or the order is ambiguous.
        NotImplementedError: scaling is enabled in a static graph; use ``paddle.amp.GradScaler``
            there.

    >>> import paddle
    >>> model = paddle.nn.Linear(2, 1)
    >>> optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    >>> scaler = GradScaler(init_loss_scaling=1024)
    >>> scaled = scaler.scale(model(paddle.ones([1, 2])).mean())
    >>> scaled.backward()
    >>> _ = scaler.minimize(optimizer, scaled)
    >>> scaler.last_step(optimizer)
    StepOutcome(applied, reason='finite', scale=1024.0)
    """

    _operations: ClassVar[Operations] = _operations
    _gradients_type: ClassVar[type[Gradients]] = PaddleGradients
    _policy: Policy
    _cache_found_inf: bool | None  # type: ignore[assignment] # Paddle's is typed as None

    _updated: _Update | None = None  # the last update, until another loss is scaled
    _update_to_come: _Update | None = None  # the next _updated, decided but not concluded

    @either_spelling
    def __init__(  # noqa: PLR0913 # Paddle's and PyTorch's, with ours
        self,
        enable: bool | float | str = True,  # a scale or a device comes first in PyTorch's order
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
        *,
        policy: Policy | None = None,
        max_retries: int = DEFAULT_MAX_RETRIES,
        group: Group | None = None,
        device: str | None = None,
        enabled: bool | None = None,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
    ) -> None:
        ((name, flag),) = given("enable", enable, "enabled", enabled).items()
        if flag not in (True, False, None):  # None is off, as in Paddle
            hint = f"; for the scale before the first step, write init_loss_scaling={flag!r}"
            hint = hint if isinstance(flag, Real) else ""
            raise TypeError(f"{name} must be True or False, got {flag!r}{hint}")
        if device is not None and not isinstance(device, str):
            raise TypeError(f"device must be the name of a device, got {device!r}")
        enable = bool(flag)
        if enable and not paddle.in_dynamic_mode():
            raise _static_graph_error()
        parameters: dict[str, object] = {
            **given("init_loss_scaling", init_loss_scaling, "init_scale", init_scale),
            **given("incr_ratio", incr_ratio, "growth_factor", growth_factor),
            **given("decr_ratio", decr_ratio, "backoff_factor", backoff_factor),
            **given("incr_every_n_steps", incr_every_n_steps, "growth_interval", growth_interval),
            "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
        }
        if policy is None:
            name = next(iter(parameters))
            parameters[name] = _number(name, parameters[name])
            policy = spelled(DynamicScale, PADDLE, **parameters)
        else:
            parameters["use_dynamic_loss_scaling"] = use_dynamic_loss_scaling
            check_alone(policy, (*defaults_of(DynamicScale.paddle), True), **parameters)
            check_policy(policy)
        if group is not None:
            check_group("group", group)
        self._group = group
        if is_fixed(policy):
            policy, use_dynamic_loss_scaling = DynamicScale.paddle(first_scale(policy)), False
        super().__init__(policy, enable, max_retries)
        # Paddle's own code reads both in a static graph, where a disabled scaler passes through.
        self._use_dynamic_loss_scaling = enable and use_dynamic_loss_scaling
        self._init_loss_scaling = first_scale(policy) if enable else 1.0
        self._set_state(policy.init())
        self._cache_found_inf = None
        self._reset_flags()

    # The calls of a training loop.

    def scale(self, var: paddle.Tensor) -> paddle.Tensor:  # type: ignore[override] # a tensor alone
        """Multiply a loss by the loss scale: ``scaled = var * scale``.

        Args:
            var: a tensor of any shape. Paddle keeps the scale in shape [1], so a loss of shape []
                gives one of shape [1].

        Returns:
            The scaled tensor, or ``var`` itself when scaling is disabled.

        Raises:
            TypeError: ``var`` is not a tensor.
            NotImplementedError: ``var`` belongs to a static graph, and scaling is enabled.
        """
        if not self._enabled:
            return super(EagerScaler, self).scale(var)  # Paddle's, also for a static graph
        if not _operations.is_tensor(var):
            if not paddle.in_dynamic_mode():
                raise _static_graph_error()
            raise TypeError(f"var must be a paddle.Tensor, got {type(var).__name__}")
        if not var._is_initialized():  # on a rank that computes nothing
            return var
        self._updated = None
        return super().scale(var)

    def unscale_(self, optimizer: PaddleOptimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, in place, and check them.

        Optional: ``step`` and ``minimize`` unscale gradients that are still scaled.

        Raises:
            RuntimeError: this iteration has already called ``unscale_`` or ``step`` for this
                optimizer; or the call is in a loop over ``attempts``.
        """
        if not self._enabled:
            return
        self._retry_state.must_not_loop("unscale_")
        kept = self._iteration.get(id(optimizer))
        if kept is not None and not isinstance(kept, PaddleGradients):  # a wrapper's own dict
            del self._iteration[id(optimizer)]
        gradients = self._iteration.find_or_make(optimizer)
        gradients.must_allow("unscale_")  # a wrapper's _unscale may not check the order of calls
        if self._unscale_is_replaced() and gradients.is_scaled:
            gradients = self._unscale_by_replacement(optimizer, gradients)
            self._iteration.watch_losses(gradients)
        else:
            super().unscale_(optimizer)

    def minimize(  # type: ignore[override] # wider than Paddle's, whose own optimizers are untyped
        self, optimizer: PaddleOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Unscale the gradients, call ``optimizer.minimize`` or skip it, and ``update``.

        Args:
            optimizer: the optimizer that owns the gradients.
            args: positional arguments for ``optimizer.minimize``; the first is the scaled loss.
            kwargs: keyword arguments for ``optimizer.minimize``.

        Returns:
            What ``optimizer.minimize`` returns: operators, and pairs of parameter and gradient.
        """
        if not self._enabled:
            minimize = super(EagerScaler, self).minimize  # Paddle's, also for a static graph
            result = minimize(optimizer, *args, **kwargs)
            self._outcomes.put(optimizer, StepOutcome(1.0, False, "disabled"))
            return result
        result = self._take_step(optimizer, ByMinimize(self), args, kwargs)
        self.update()
        return result

    def update(self) -> None:  # type: ignore[override] # Paddle's takes no scale
        """Move the scale by the policy, given the found_inf of this iteration's optimizers.

        An overflow of any optimizer counts as a non-finite step of the policy. If more optimizers
        step before another loss is scaled, the next call counts them into the same step. Without
        dynamic loss scaling the scale does not move.

        Raises:
            RuntimeError: no gradients were checked since the last call.
        """
        if not self._enabled:
            return
        if not self._use_dynamic_loss_scaling:
            for observer in self._observers:
                observer.updating()
            self._end_iteration()
            for observer in self._observers:
                observer.updated()
            return
        before = self._host_state().scale
        super().update()
        after = self._host_state().scale
        if after < before:
            logger.debug("non-finite gradients: loss scale %g, now %g", before, after)

    # Getters and setters.

    def is_enable(self) -> bool:
        """Whether loss scaling is on. If not, every call passes its arguments through."""
        return self._enabled

    is_enabled = is_enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale moves."""
        return self._enabled and self._use_dynamic_loss_scaling

    def get_scale(self) -> float:
        """The scale for the next loss, also in a body; 0.0 if scaling is disabled.

        This is a method of Paddle's development version; release 3.3.1 lacks it.
        """
        return float(self._scale_in_use()) if self._enabled else 0.0

    def get_init_loss_scaling(self) -> float:
        """The scale that was set or loaded last, at first the initial one; 1.0 if disabled."""
        return self._init_loss_scaling if self._enabled else 1.0

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the current scale, not only the initial one.

        Raises:
            ValueError: the value is not positive, is outside the policy's bounds, or is not finite
                in float32; nothing changes.
            TypeError: the value is not a number; nothing changes.
        """
        bounds = self._parameter("min_scale"), self._parameter("max_scale")
        scale = _number("new_init_loss_scaling", new_init_loss_scaling)
        scale = _checks.loss_scale("new_init_loss_scaling", scale, *bounds)
        self._init_loss_scaling = scale
        self._replace_scale(scale)

    def get_incr_ratio(self) -> float:
        """The factor by which the scale grows."""
        return float(self._parameter("growth_factor"))

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Grow by ``new_incr_ratio``, > 1, from now on."""
        self._change_policy(incr_ratio=new_incr_ratio)

    get_growth_factor = get_incr_ratio

    def set_growth_factor(self, new_factor: float) -> None:
        """Grow by ``new_factor``, > 1, from now on."""
        self._change_policy(growth_factor=new_factor)

    def get_decr_ratio(self) -> float:
        """The factor by which the scale backs off."""
        return float(self._parameter("backoff_factor"))

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Back off by ``new_decr_ratio``, in (0, 1), from now on."""
        self._change_policy(decr_ratio=new_decr_ratio)

    get_backoff_factor = get_decr_ratio

    def set_backoff_factor(self, new_factor: float) -> None:
        """Back off by ``new_factor``, in (0, 1), from now on."""
        self._change_policy(backoff_factor=new_factor)

    def get_incr_every_n_steps(self) -> int:
        """Finite steps in a row before growth."""
        return int(self._parameter("growth_interval"))

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Grow after this many finite steps from now on. Those already taken count."""
        self._change_policy(incr_every_n_steps=new_incr_every_n_steps)

    get_growth_interval = get_incr_every_n_steps

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after this many finite steps from now on. Those already taken count."""
        self._change_policy(growth_interval=new_interval)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Non-finite steps before a backoff; 1 for a policy without a hysteresis."""
        return int(self._parameter("hysteresis"))

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Back off at this many non-finite steps from now on. Those already taken count."""
        self._change_policy(decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    # State.

    def state_dict(self) -> dict[str, object]:  # type: ignore[override] # Paddle's says Tensor
        """The scale, the rule's parameters and the two counts, under Paddle's eight keys.

        ``scale`` is a float32 array of shape [1]. An ``AmaxScale`` adds ``_peak`` and
        ``_reach``, which Paddle ignores. The dict is empty if scaling is disabled.
        """
        if not self._enabled:
            return {}
        state = self._host_state()
        values = write_paddle(self._policy, state)
        state_dict = dict(zip(PADDLE_KEYS, values, strict=True))
        state_dict["use_dynamic_loss_scaling"] = self._use_dynamic_loss_scaling
        return {**state_dict, **write_leaves(state)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the scale, the rule and the counts, also from Paddle's own state dict.

        The state dict of another framework's scaler replaces the rule by that framework's (see
        :mod:`gradscaler.checkpoint`). If this raises, nothing changes. If scaling is disabled, it
        does nothing.

        Raises:
            RuntimeError: the dict is empty: it was saved with scaling disabled.
            KeyError: a key is missing.
            TypeError, ValueError: a value has the wrong type or is out of range; the message names
                its key.
        """
        if not self._enabled:
            return
        if reading.detect(state_dict) in (None, "paddle"):
            values = state_values(state_dict, PADDLE_KEYS)
            policy, counts, dynamic = read_paddle(values, self._policy)
            state = read_leaves(policy, counts, state_dict)
        else:
            read, state = reading.read(state_dict)
            dynamic = not is_fixed(read)
            policy = read if dynamic else DynamicScale.paddle(first_scale(read))
        self._policy = policy
        self._use_dynamic_loss_scaling = dynamic
        self._init_loss_scaling = float(state.scale)
        self._set_state(state)
        self._forget_next_state()

    def _start(self) -> None:
        super()._start()
        self._orders: defaultdict[Group, Order] = defaultdict(Order)

    def __getstate__(self) -> dict[str, object]:
        of_loss = ("_updated", "_update_to_come")
        left_out = dict.fromkeys(("_orders", *_FLAGS, "_found_inf", *of_loss))
        return {**super().__getstate__(), **left_out}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._set_state(self._initial_state)
        self._reset_flags()

    # The private names.

    @property
    def _enable(self) -> bool:
        return self._enabled

    @_enable.setter
    def _enable(self, enable: bool) -> None:
        self._enabled = enable

    @property
    def _scale(self) -> Tensor | None:
        if not self._enabled:
            return None  # as in Paddle's disabled scaler, because Paddle's code reads it
        return paddle.full([1], float(self._scale_in_use()), dtype="float32")

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._replace_scale(number_in("_scale", scale))

    @property
    def _incr_count(self) -> int:
        return int(self._host_state().finite_steps)

    @_incr_count.setter
    def _incr_count(self, count: int) -> None:
        self._set_state(self._host_state()._replace(finite_steps=count))

    @property
    def _decr_count(self) -> int:
        return int(self._host_state().nonfinite_steps)

    @_decr_count.setter
    def _decr_count(self, count: int) -> None:
        self._set_state(self._host_state()._replace(nonfinite_steps=count))

    _incr_ratio = property(get_incr_ratio, set_incr_ratio)
    _decr_ratio = property(get_decr_ratio, set_decr_ratio)
    _incr_every_n_steps = property(get_incr_every_n_steps, set_incr_every_n_steps)
    _decr_every_n_nan_or_inf = property(get_decr_every_n_nan_or_inf, set_decr_every_n_nan_or_inf)

    @property
    def _optimizer_states(self) -> Any:
        return self._iteration

    @_optimizer_states.setter
    def _optimizer_states(self, records: Any) -> None:
        # Fleet sets the value that it has read, with dicts of its own, which unscale_() removes.
        loss = self._iteration.loss
        self._iteration = Iteration(self._new_gradients, records)
        self._iteration.loss = loss

    def _unscale(self, optimizer: PaddleOptimizer) -> None:
        """Unscale, check and record. Fleet and group-sharded training replace this method."""
        super().unscale_(optimizer)

    def _update(self) -> None:
        """Move the scale by ``_cache_found_inf``, for Paddle's wrappers around a scaler."""
        if self._enabled:
            found_infs: list[FoundInf] = [{"found_inf": self._cache_found_inf}]
            amaxes = self._iteration.amaxes(self._policy)
            state = self._host_state()
            self._set_state(_operations.next_state(self._policy, state, found_infs, amaxes))

    # Objects for the engine. Fleet assigns an _unscale to a scaler; only these look for that.

    def _unscale_is_replaced(self) -> bool:
        return getattr(self._unscale, "__func__", None) is not GradScaler._unscale

    def _unscaler(self, optimizer: PaddleOptimizer) -> OwnUnscaler:
        return OwnUnscaler(optimizer, is_plain=not self._unscale_is_replaced())

    @property
    def _processes(self) -> PaddleProcesses:  # type: ignore[override] # read-only
        asks_fleet = not self._unscale_is_replaced()  # fleet's own asks all processes
        return PaddleProcesses(self._group, asks_fleet, self._orders, self._show_flag)

    def _stepping_of(self, optimizer: PaddleOptimizer) -> ByStep:
        return ByStep(self)

    def _unscale_by_replacement(
        self, optimizer: PaddleOptimizer, gradients: Gradients
    ) -> Gradients:
        """Call the method that replaces ``_unscale``; return the gradients with its found_inf."""
        gradient_scale = self._gradient_scale(gradients, "unscale_")
        if self._retry_state.losses is None:
            for observer in self._observers:
                observer.unscaling(optimizer, gradient_scale.scale)
        with self._showing(gradient_scale.scale):  # the method divides by _scale
            self._unscale(optimizer)
        kept = self._iteration.get(id(optimizer))
        gradients = kept if isinstance(kept, PaddleGradients) else self._new_gradients()
        if gradients.found_inf is None:  # the method has not called ours
            gradients.optimizer, gradients.scale = optimizer, gradient_scale.scale
            found_inf, amax = {"found_inf": self._found_inf}, None
            if gradients.amax_is_due(found_inf, gradient_scale):
                amax = largest_of(unscaled_by_fleet(optimizer), asked_by_fleet(self._unscale))
            deciders = self._processes.deciders_of(optimizer)
            gradients.record_check(found_inf, gradient_scale, deciders, amax=amax)
            self._iteration.record(gradients)
        if gradients.is_scaled:
            gradients.move("unscaled")
        return gradients

    # Where Paddle's rules differ from the engine's.

    def _gradient_scale(self, gradients: Gradients, call: str) -> GradientScale:
        """The scale of gradients.

        An optimizer that joins the last update is counted from that update's first state, not from
        the state in force. So its largest gradient is always read.
        """
        gradient_scale = super()._gradient_scale(gradients, call)
        if self._updated is None or not gradient_scale.amax_interval:
            return gradient_scale
        return gradient_scale._replace(amax_interval=1)

    def _scale_moves(self) -> bool:
        return self._use_dynamic_loss_scaling

    def _conclude(
        self, optimizer: PaddleOptimizer, gradients: Gradients, reason: Reason | None = None
    ) -> None:
        """Record the outcome, and end the iteration if no ``update`` need follow."""
        super()._conclude(optimizer, gradients, reason)
        if not self._use_dynamic_loss_scaling:
            self._iteration.pop(id(optimizer), None)

    def _moved(self, state: State, found_infs: list[FoundInf], amaxes: list[np.float32]) -> State:
        """The state after this iteration.

        Optimizers that step without another loss since the last update are added to that update's
        step, which is decided again from its first state.
        """
        start, optimizers, last = state, self._iteration.uncounted(), self._updated
        if last is not None and optimizers.isdisjoint(last.optimizers):
            start, optimizers = last.start, optimizers | last.optimizers
            found_infs, amaxes = last.found_infs + found_infs, last.amaxes + amaxes
        if self._iteration.loss is not None:
            self._update_to_come = _Update(start, optimizers, found_infs, amaxes)
        return super()._moved(start if found_infs else state, found_infs, amaxes)

    def _end_iteration(self) -> None:
        # Only now, so that an interrupted update() decides the same when it is called again.
        self._updated, self._update_to_come = self._update_to_come or self._updated, None
        super()._end_iteration()

    def _set_scale(self, new_scale: float | Tensor) -> None:
        self.set_init_loss_scaling(new_scale)

    def _show_flag(self, found_inf: FoundInf) -> None:
        """Set ``_found_inf``, the tensor in which fleet reads found_inf."""
        flag = found_inf.get("found_inf", False)
        if isinstance(flag, bool):
            flag = paddle.ones([1], "bool") if flag else self._temp_found_inf_value_false
        self._found_inf = flag

    def _reset_flags(self) -> None:
        if not paddle.in_dynamic_mode():  # the tensors would become part of the user's program
            return
        for name in _FLAGS:
            setattr(self, name, paddle.zeros([1], dtype="bool"))
        self._found_inf = paddle.zeros([1], dtype="bool")

    # Helpers of the above.

    def _replace_scale(self, scale: float) -> None:
        self._set_state(self._host_state()._replace(scale=np.float32(scale)))
        self._forget_next_state()

    def _set_state(self, state: State) -> None:
        self._keep_scale_of_loss(self._host_state())
        self._initial_state = self._state = state
        self._updated = None

    def _parameter(self, name: str) -> Any:
        """A parameter of the rule; Paddle's default, without effect, if the policy lacks it."""
        return getattr(self._policy, name, getattr(PADDLE_DEFAULTS, name))

    def _change_policy(self, **changes: Any) -> None:
        self._policy = changed(self._policy, PADDLE, **changes)


def _number(name: str, value: object) -> float:
    """The number in a scale: a number, or a tensor or array of one element, as Paddle takes."""
    return _checks.number(name, number_in(name, value))
