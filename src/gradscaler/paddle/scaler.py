"""``paddle.amp.GradScaler``, on any device and under any autocast, with the engine behind it."""

from __future__ import annotations

import logging
from collections import defaultdict
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import paddle
from paddle.distributed.communication.group import Group

from gradscaler import checkpoint
from gradscaler._eager.closure import DEFAULT_MAX_RETRIES
from gradscaler._eager.decision import Order
from gradscaler._eager.operations import FoundInf, Operations, Tensor
from gradscaler._eager.record import OptimizerRecord, Records, owner_of
from gradscaler._eager.scaler import EagerScaler
from gradscaler.checkpoint._formats import (
    PADDLE_KEYS,
    read_leaves,
    read_paddle,
    write_leaves,
    write_paddle,
)
from gradscaler.checkpoint._state_dicts import number_in, state_values
from gradscaler.errors import ParameterError
from gradscaler.outcome import Reason, StepOutcome
from gradscaler.paddle import _operations
from gradscaler.paddle._processes import (
    any_of,
    asked_by_fleet,
    check_group,
    check_shards,
    group_of,
    is_distributed,
    largest_of,
    reduce_norm,
    settle,
    split_by,
    unscaled_by_fleet,
)
from gradscaler.paddle._record import PaddleOptimizer, PaddleRecord
from gradscaler.paddle._spelling import either_spelling, given
from gradscaler.paddle._static import run_dynamically, static_graph_error
from gradscaler.policies import (
    AmaxScale,
    DynamicScale,
    FixedScale,
    OwnPolicy,
    State,
    _checks,
)
from gradscaler.policies._presets import PADDLE
from gradscaler.policies._spelling import changed, check_alone, check_policy, spelled

logger = logging.getLogger(__name__)

_FLAGS = (
    "_temp_found_inf_value_false",
    "_temp_found_inf_fp16",
    "_temp_found_inf_bf16",
    "_temp_found_inf_fp32",
)


class _Update(NamedTuple):
    """An update that more optimizers may join.

    It has its first state, their ids, their flags and their largest gradients.
    """

    start: State
    optimizers: set[int]
    found_infs: list[FoundInf]
    amaxes: list[np.float32]


@run_dynamically
class GradScaler(EagerScaler[paddle.Tensor, PaddleOptimizer], paddle.amp.GradScaler):
    """Loss scaling for Paddle's dynamic graph: a drop-in for ``paddle.amp.GradScaler``.

    It scales on every device and under every autocast dtype; Paddle's switches itself off on the
    CPU, and permanently when ``scale`` is first called outside float16 autocast. found_inf is each
    optimizer's own. Gradients are unscaled by the scale that the last ``scale`` used. What is
    updated after one loss, such as several optimizers by ``minimize``, is one iteration. An
    overflow prints nothing; a backoff is a ``logging`` record at level DEBUG. Under
    ``paddle.jit.to_static`` a step goes as in eager mode: each call breaks the graph.

    Under fleet's model and pipeline parallelism ``clip_grad_norm_`` goes by the norm of the whole
    model. Where ``optimizer.step`` averages gradients (sharding, or data parallelism beside
    another) it raises a ``ValueError``: there, give ``ClipGradByGlobalNorm`` to the optimizer.

    Args:
        enable: if False or None, everything passes through.
        init_loss_scaling: the scale before the first step.
        incr_ratio: multiplies the scale when it grows, > 1.
        decr_ratio: multiplies the scale when it backs off, in (0, 1).
        incr_every_n_steps: finite steps in a row before the scale grows.
        decr_every_n_nan_or_inf: non-finite steps before the scale backs off; a finite step makes
            the count start again.
        use_dynamic_loss_scaling: if False the scale never moves; an overflow still skips its step,
            and ``update`` need not be called.
        policy: the rule as a whole, in place of the parameters after ``enable``: a
            :class:`gradscaler.DynamicScale`, a :class:`gradscaler.FixedScale`, or a
            :class:`gradscaler.AmaxScale`.
        max_retries: how often ``step(optimizer, closure)`` repeats an evaluation that overflows,
            and a loop over ``attempts`` its body.
        group: the process group that decides together whether to step, and at which scale, by one
            all-reduce a step. None takes all processes for an optimizer of fleet's hybrid
            parallelism (sharding, model, pipeline and segment), and this one alone otherwise:
            ``DataParallel`` gives all the same gradients. Name it for parameters of one process
            alone, and for a loop over ``attempts``. Each of them then calls ``step`` for the same
            optimizers in the same order.
        device: PyTorch's, which changes nothing: a scaler works on every device.
        enabled, init_scale, growth_factor, backoff_factor, growth_interval: PyTorch's names of
            ``enable``, ``init_loss_scaling``, ``incr_ratio``, ``decr_ratio`` and
            ``incr_every_n_steps``. The defaults stay Paddle's.

    As in Paddle's development version, a text or a number first means PyTorch's order:
    ``GradScaler(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)``, or
    the same without ``device``. A bool or None first means Paddle's. 0 or 1 first may be ``enable``
    or ``init_scale``: write which, or give the other of the two by name.

    The defaults are those of Paddle's reference documentation. Release 3.3.1 itself has 65536.0,
    2000 and 1 for ``init_loss_scaling``, ``incr_every_n_steps`` and ``decr_every_n_nan_or_inf``.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not the kind of number it should be, ``enable`` is not a bool,
            ``device`` is not a text, a parameter is given twice, or the order is unclear.
        NotImplementedError: scaling is enabled in a static graph, which takes
            ``paddle.amp.GradScaler``.

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
    _record_type: ClassVar[type[OptimizerRecord]] = PaddleRecord
    _knows_process_groups: ClassVar[bool] = True
    _policy: DynamicScale | AmaxScale
    _cache_found_inf: bool | None  # type: ignore[assignment] # Paddle's has the type of its None

    _scaled_by: np.float32 | None = None  # what the last loss was multiplied by
    _updated: _Update | None = None  # the last update, until another loss is scaled

    @either_spelling
    def __init__(
        self,
        enable: bool | float | str = True,  # a scale or a device comes first in PyTorch's order
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
        *,
        policy: OwnPolicy | None = None,
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
        if flag not in (True, False, None):  # None is off, as with Paddle
            hint = f"; for the scale before the first step, write init_loss_scaling={flag!r}"
            hint = hint if isinstance(flag, Real) else ""
            raise TypeError(f"{name} must be True or False, got {flag!r}{hint}")
        if device is not None and not isinstance(device, str):
            raise TypeError(f"device must be the name of a device, got {device!r}")
        enable = bool(flag)
        if enable and not paddle.in_dynamic_mode():
            raise static_graph_error()
        parameters: dict[str, Any] = {
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
            check_alone(policy, (2.0**15, 2.0, 0.5, 1000, 2, True), **parameters)
            check_policy(policy, OwnPolicy)
        if group is not None:
            check_group("group", group)
        self._group = group
        if isinstance(policy, FixedScale):
            policy, use_dynamic_loss_scaling = DynamicScale.paddle(policy.scale), False
        super().__init__(policy, enable, max_retries)
        # Paddle's own code reads both in a static graph, where a disabled scaler passes through.
        self._use_dynamic_loss_scaling = enable and use_dynamic_loss_scaling
        self._init_loss_scaling = policy.init_scale if enable else 1.0
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
            NotImplementedError: it belongs to a static graph, and scaling is enabled.
        """
        if not self._enabled:
            return super(EagerScaler, self).scale(var)  # Paddle's, also for a static graph
        if not _operations.is_tensor(var):
            if not paddle.in_dynamic_mode():
                raise static_graph_error()
            raise TypeError(f"var must be a paddle.Tensor, got {type(var).__name__}")
        if not var._is_initialized():
            return var
        self._scaled_by, self._updated = self._host_state().scale, None
        return super().scale(var)

    def unscale_(self, optimizer: PaddleOptimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, in place, and check them.

        Optional: ``step`` and ``minimize`` do it where you did not.

        Raises:
            RuntimeError: it was called before, or after ``step``, in this iteration.
        """
        if not self._enabled:
            return
        if self._closures.in_loop:
            raise self._closures.refusal("unscale_")
        record = self._records.get(id(optimizer))
        if record is not None and not isinstance(record, PaddleRecord):  # a wrapper's own dict
            del self._records[id(optimizer)]
        record = self._record(optimizer)
        record.check("unscale_")  # a wrapper's _unscale may not look at the order
        if not record.is_scaled:
            record.move("unscale_")
            return
        in_force, state = self._state, record.made_with or self._placed_state("unscale_")
        if self._unscale_is_replaced():  # by one that announces nothing
            self._announce_unscale(optimizer, state)
        self._state = state  # what is put in place of _unscale divides by _scale
        try:
            self._unscale(optimizer)
        finally:
            self._state = in_force
        record = self._records.get(id(optimizer))
        if not isinstance(record, PaddleRecord):
            record = self._records[id(optimizer)] = PaddleRecord()
        if record.found_inf is None:  # Fleet and the like put an _unscale of their own here
            record.optimizer = optimizer
            record.scale = self._in_use(state).scale
            deciders, found_inf = self._deciders(optimizer), {"found_inf": self._found_inf}
            amax = None
            if self._amax_is_due(found_inf):
                amax = largest_of(unscaled_by_fleet(optimizer), asked_by_fleet(self._unscale))
            record.found_inf, record.amax = self._decision(record, deciders, found_inf, amax)
        if record.is_scaled:
            record.move("unscale_")

    def minimize(  # type: ignore[override] # wider than Paddle's, whose own optimizers are untyped
        self, optimizer: PaddleOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Unscale the gradients, ``optimizer.minimize(*args, **kwargs)`` or skip, and ``update``.

        Args:
            optimizer: the optimizer that owns the gradients.
            args: for ``optimizer.minimize``; the first is the scaled loss.
            kwargs: for ``optimizer.minimize``.

        Returns:
            What ``optimizer.minimize`` returns: operators, and pairs of parameter and gradient.
        """
        if not self._enabled:
            minimize = super(EagerScaler, self).minimize  # Paddle's, also for a static graph
            result = minimize(optimizer, *args, **kwargs)
            self._outcomes.put(owner_of(optimizer), StepOutcome(1.0, False, "disabled"))
            return result
        record = self._record_to_step(optimizer)
        state = record.made_with or self._placed_state("step")
        self._announce_step(optimizer, record, state)
        try:
            record = self._unscaled(record, state)
            result = self._step_if_finite(optimizer, record, args, kwargs, "minimize")
            if not record.found_inf or _operations.any_set(record.found_inf):
                result = _skipped_minimize(optimizer, args, kwargs)
            self._conclude(optimizer, record)
        except BaseException as error:
            self._note_raised(optimizer, error)
            raise
        self.update()
        return result

    def update(self) -> None:  # type: ignore[override] # Paddle's takes no scale
        """Move the scale by the policy, from what this iteration's checks found.

        Any optimizer's overflow makes it a non-finite step. If other optimizers follow before
        another loss is scaled, the next call counts them into the same step. Without dynamic loss
        scaling there is nothing to do.

        Raises:
            RuntimeError: nothing was checked since the last call.
        """
        super().update()

    # Getters and setters.

    def is_enable(self) -> bool:
        """Whether loss scaling is on; if not, every call passes through."""
        return self._enabled

    is_enabled = is_enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale moves."""
        return self._enabled and self._use_dynamic_loss_scaling

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied by.

        0.0 if scaling is disabled, as in Paddle's development version; release 3.3.1 has no such
        method.
        """
        return float(self._host_state().scale) if self._enabled else 0.0

    def get_init_loss_scaling(self) -> float:
        """The initial scale, or the one that was set or loaded last; 1.0 if scaling is disabled."""
        return self._init_loss_scaling if self._enabled else 1.0

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the scale itself.

        Raises:
            ValueError, TypeError: it cannot be a loss scale; nothing changes.
        """
        bounds = self._policy.min_scale, self._policy.max_scale
        scale = _number("new_init_loss_scaling", new_init_loss_scaling)
        scale = _checks.loss_scale("new_init_loss_scaling", scale, *bounds)
        self._init_loss_scaling = scale
        self._replace_scale(scale)

    def get_incr_ratio(self) -> float:
        """What growth multiplies the scale by."""
        return self._policy.growth_factor

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Grow by ``new_incr_ratio``, > 1, from now on."""
        self._change_policy(incr_ratio=new_incr_ratio)

    get_growth_factor = get_incr_ratio

    def set_growth_factor(self, new_factor: float) -> None:
        """Grow by ``new_factor``, > 1, from now on."""
        self._change_policy(growth_factor=new_factor)

    def get_decr_ratio(self) -> float:
        """What a backoff multiplies the scale by."""
        return self._policy.backoff_factor

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Back off by ``new_decr_ratio``, in (0, 1), from now on."""
        self._change_policy(decr_ratio=new_decr_ratio)

    get_backoff_factor = get_decr_ratio

    def set_backoff_factor(self, new_factor: float) -> None:
        """Back off by ``new_factor``, in (0, 1), from now on."""
        self._change_policy(backoff_factor=new_factor)

    def get_incr_every_n_steps(self) -> int:
        """Finite steps in a row before growth."""
        return self._policy.growth_interval

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Grow after this many finite steps from now on, those already taken included."""
        self._change_policy(incr_every_n_steps=new_incr_every_n_steps)

    get_growth_interval = get_incr_every_n_steps

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after this many finite steps from now on, those already taken included."""
        self._change_policy(growth_interval=new_interval)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Non-finite steps before a backoff; 1 for a policy without a hysteresis."""
        return getattr(self._policy, "hysteresis", 1)

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Back off at this many non-finite steps from now on, those already taken included."""
        self._change_policy(decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    # State.

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override] # Paddle's says Tensor
        """The scale, the rule's parameters and the two counts, by Paddle's eight keys.

        ``scale`` is a float32 array of shape [1]. An ``AmaxScale`` adds ``_peak`` and
        ``_reach``, which Paddle ignores. Empty if scaling is disabled.
        """
        if not self._enabled:
            return {}
        state = self._host_state()
        values = write_paddle(self._policy, state)
        state_dict = dict(zip(PADDLE_KEYS, values, strict=True))
        state_dict["use_dynamic_loss_scaling"] = self._use_dynamic_loss_scaling
        return {**state_dict, **write_leaves(state)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take everything from a state dict, Paddle's own or that of another framework's scaler.

        For the latter see :mod:`gradscaler.checkpoint`; it brings its whole rule.
        Nothing changes if it raises; nothing happens if scaling is disabled.

        Raises:
            RuntimeError: the dict is empty, as one saved with scaling disabled is.
            KeyError: a key is missing.
            TypeError, ValueError: a value cannot be what its key says; the message names it.
        """
        if not self._enabled:
            return
        if checkpoint.detect(state_dict) in (None, "paddle"):
            values = state_values(state_dict, PADDLE_KEYS)
            policy, counts, dynamic = read_paddle(values, self._policy)
            state = read_leaves(policy, counts, state_dict)
        else:
            read, state = checkpoint.read(state_dict)
            dynamic = isinstance(read, DynamicScale)
            policy = read if isinstance(read, DynamicScale) else DynamicScale.paddle(read.scale)
        self._policy = policy
        self._use_dynamic_loss_scaling = dynamic
        self._init_loss_scaling = float(state.scale)
        self._set_state(state)
        self._forget_next_state()

    def _start_records(self) -> None:
        super()._start_records()
        self._orders: defaultdict[Group, Order] = defaultdict(Order)

    def __getstate__(self) -> dict[str, Any]:
        left_out = dict.fromkeys(("_orders", *_FLAGS, "_found_inf", "_scaled_by", "_updated"))
        return {**super().__getstate__(), **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
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
            return None
        scale = self._in_use(self._host_state()).scale
        return paddle.full([1], float(scale), dtype="float32")

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
        return self._records

    @_optimizer_states.setter
    def _optimizer_states(self, records: Any) -> None:
        self._records = Records(self._record_type, records)

    # How Paddle does what the engine asks for.

    def _placed_state(self, caller: str, optimizer: Any = None) -> State:
        """The state that the gradients were made with; for ``update``, the one in force."""
        state = super()._placed_state(caller, optimizer)
        if self._scaled_by is None or caller == "update":
            return state
        return state._replace(scale=self._scaled_by)

    def _step_with_closure(self, *args: Any) -> Any:
        scaled_by = self._scaled_by  # the closure scales a loss of its own
        try:
            return super()._step_with_closure(*args)
        finally:
            self._scaled_by = scaled_by

    def _unscale(self, optimizer: Any) -> None:
        """What Fleet and group-sharded training put a method of their own in place of."""
        super().unscale_(optimizer)

    def _unscale_is_replaced(self) -> bool:
        return getattr(self._unscale, "__func__", None) is not GradScaler._unscale

    def _deciders(self, optimizer: Any) -> Group | None:
        group = self._group
        if group is None and not self._unscale_is_replaced():  # Fleet's asks all processes
            group = group_of(optimizer)
        return None if group is None or group.nranks == 1 else group

    def _repeaters(self, optimizer: Any) -> Group | None:
        deciders = self._deciders(optimizer)
        if deciders is None and self._group is None and is_distributed():
            raise ParameterError(
                "attempts() is to repeat a backward pass on all processes or on none, and nothing "
                "tells on which: construct GradScaler(group=...) with the process group that "
                "decides together, such as paddle.distributed.get_group(0)"
            )
        return deciders

    def _check(self, optimizer: Any) -> FoundInf:
        return _operations.check(optimizer)

    def _decision(
        self,
        record: OptimizerRecord,
        deciders: Group | None,
        found_inf: FoundInf,
        amax: np.float32 | None,
    ) -> tuple[FoundInf, np.float32 | None]:
        if deciders is not None:
            # All hold a tensor on a mesh alike; others may be those of a stage or a shard.
            parameters = _operations.parameters_of(record.optimizer)
            shapes = (parameter.shape for parameter in parameters if parameter.is_dist())
            identity = self._orders[deciders].identity(record.optimizer, shapes)
            state = self._in_use(self._host_state())
            found_inf, amax = settle(deciders, identity, state, found_inf, amax)
        flag = found_inf.get("found_inf", False)
        if isinstance(flag, bool):
            flag = paddle.ones([1], "bool") if flag else self._temp_found_inf_value_false
        self._found_inf = flag
        return found_inf, amax

    def _finite_steps(self) -> int | None:
        # An optimizer that joins the last update is counted from where that started.
        return super()._finite_steps() if self._updated is None else None

    def _is_anywhere(self, optimizer: Any, flag: bool) -> bool:
        deciders = self._deciders(optimizer) if self._enabled else None
        return flag if deciders is None else any_of(deciders, flag)

    def _parts(self, optimizer: Any, shards: Any) -> Any:
        check_shards(optimizer, shards)
        return split_by(optimizer, shards)

    def _measure(self, record: OptimizerRecord, parts: Any, deciders: Any = None) -> Any:
        if self._unscale_is_replaced() or len(parts) > 1:  # it may reduce found_inf over processes
            return None
        norm = super()._measure(record, parts, self._deciders(record.optimizer))
        return None if norm is None else reduce_norm(dict.fromkeys(parts, norm), 2.0)

    def _total_norm(self, optimizer: Any, norm_type: float, parts: Any) -> Any:
        norms = {groups: _operations.total_norm(part, norm_type) for groups, part in parts.items()}
        return reduce_norm(norms, norm_type)

    def _step_if_finite(
        self,
        optimizer: Any,
        record: OptimizerRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "step",
    ) -> Any:
        if not record.found_inf:
            self._cache_found_inf = False
            return None
        self._cache_found_inf = _operations.any_set(record.found_inf)
        result = None
        if not self._cache_found_inf:
            self._apply_pending(record)
            shares_flag = hasattr(optimizer, "_set_auxiliary_var")
            if shares_flag:
                optimizer._set_auxiliary_var("found_inf", self._unset_flag_for(optimizer))
            result = record.apply(getattr(optimizer, method), *args, **kwargs)
            if shares_flag:  # a distributed optimizer may have found one elsewhere
                flag = optimizer._get_auxiliary_var("found_inf")
                self._cache_found_inf = _operations.is_set(flag)
        record.found_inf = {"found_inf": self._cache_found_inf}  # read once
        return result

    def _unset_flag_for(self, optimizer: Any) -> Any:
        """A tensor; or False, which Paddle's own make of it in the time that a small step takes.

        On an XPU they ask the tensor whether it is distributed.
        """
        own = type(optimizer).__module__.startswith("paddle.optimizer.")
        plain = own and "xpu" not in paddle.device.get_device()
        return False if plain else self._temp_found_inf_value_false

    def _conclude(
        self, optimizer: Any, record: OptimizerRecord, reason: Reason | None = None
    ) -> None:
        super()._conclude(optimizer, record, reason)
        if not self._use_dynamic_loss_scaling:
            self._records.pop(id(optimizer), None)

    def _update(self) -> None:
        """Move the scale by ``_cache_found_inf``, for Paddle's wrappers around a scaler."""
        if self._enabled:
            found_infs: list[FoundInf] = [{"found_inf": self._cache_found_inf}]
            amaxes = self._amaxes()
            state = self._host_state()
            self._set_state(_operations.next_state(self._policy, state, found_infs, amaxes))

    def _scale_moves(self) -> bool:
        return self._use_dynamic_loss_scaling

    def _move(self, new_scale: Any = None) -> None:
        """Move the scale; optimizers that follow without another loss belong to the same step."""
        if not self._use_dynamic_loss_scaling:
            for observer in self._observers:
                observer.updating()
            self._end_iteration()
            return
        before = self._host_state().scale
        start = self._closures.backed_off or self._host_state()
        optimizers = set(self._records)
        found_infs = [record.found_inf for record in self._records.values() if record.found_inf]
        amaxes = self._amaxes()
        super()._move()
        last = self._updated
        if last is not None and optimizers.isdisjoint(last.optimizers):  # one loss, one step
            start, optimizers = last.start, optimizers | last.optimizers
            found_infs, amaxes = last.found_infs + found_infs, last.amaxes + amaxes
            if found_infs:
                self._state = _operations.next_state(self._policy, start, found_infs, amaxes)
        if self._scaled_by is not None:
            self._updated = _Update(start, optimizers, found_infs, amaxes)
        after = self._host_state().scale
        if after < before:
            logger.debug("non-finite gradients: loss scale %g, now %g", before, after)

    def _set_scale(self, new_scale: Any) -> None:
        self.set_init_loss_scaling(new_scale)

    def _reset_flags(self) -> None:
        if not paddle.in_dynamic_mode():  # these would be operations of the user's program
            return
        for name in _FLAGS:
            setattr(self, name, paddle.zeros([1], dtype="bool"))
        self._found_inf = paddle.zeros([1], dtype="bool")

    # Shared.

    def _replace_scale(self, scale: float) -> None:
        self._set_state(self._host_state()._replace(scale=np.float32(scale)))
        self._forget_next_state()

    def _set_state(self, state: State) -> None:
        self._initial_state = self._state = state
        self._updated = None

    def _change_policy(self, **changes: Any) -> None:
        for name in changes:
            if not hasattr(self._policy, PADDLE.get(name, name)):
                raise TypeError(f"{self._policy!r} has no {name} to set")
        self._policy = changed(self._policy, PADDLE, **changes)


def _number(name: str, value: object) -> float:
    """A scale as Paddle's own scaler takes it: a number, or a tensor or array of one element."""
    return _checks.number(name, number_in(name, value))


def _skipped_minimize(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``optimizer.minimize`` would have returned: no operators, and the gradients."""
    if not hasattr(optimizer, "backward"):
        return None, None
    return [], optimizer.backward(*args, **kwargs)
