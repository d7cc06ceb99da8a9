"""The eager scaler: scale, unscale, step or skip, update. Once, for every eager framework."""

from __future__ import annotations

import copy as copying
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, overload

from gradscaler._eager.attempts import AttemptLoop
from gradscaler._eager.closure import ClosureRun, Closures
from gradscaler._eager.operations import FoundInf, Operations, Optimizer, Tensor
from gradscaler._eager.outcomes import Outcomes
from gradscaler._eager.record import UNKNOWN_GRADIENTS, OptimizerRecord, Records, Stage, owner_of
from gradscaler.errors import CallOrderError
from gradscaler.outcome import HISTORY_LENGTH, Observer, Reason, StepOutcome
from gradscaler.policies import FixedScale, Policy, State, amax_interval

_KNOWN = (Stage.MEASURED, Stage.UNSCALED_TO_CLIP, Stage.UNSCALED)

TensorT = TypeVar("TensorT")
OptimizerT = TypeVar("OptimizerT", bound=Any)


class EagerScaler(ABC, Generic[TensorT, OptimizerT]):
    """Loss scaling for one training loop; an adapter adds its framework's spelling.

    Each optimizer has a record, whose stage says what is true of its gradients, until ``update``
    ends the iteration. Only ``update`` moves the scale, so gradients are unscaled by the scale that
    their loss was scaled by. found_inf is each optimizer's own, and any of them moves the scale.
    """

    def __init__(self, policy: Policy, enabled: bool, max_retries: int) -> None:
        self._policy = policy
        self._enabled = enabled
        self._max_retries = _check_retries(max_retries)
        self._initial_state = policy.init()
        self._state: State | None = None  # placed where the first scaled tensor lives
        self._start_records()

    # The five calls of a training loop.

    @overload
    def scale(self, outputs: TensorT) -> TensorT: ...

    @overload
    def scale(self, outputs: list[TensorT]) -> list[TensorT]: ...

    @overload
    def scale(self, outputs: tuple[TensorT, ...]) -> tuple[TensorT, ...]: ...

    @overload
    def scale(self, outputs: Iterable[TensorT]) -> Iterable[TensorT]: ...

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the loss scale: ``scaled = outputs * scale``.

        Args:
            outputs: a tensor of any shape, or a list, tuple (named ones too) or other iterable of
                them, nested at will.

        Returns:
            The same structure of scaled tensors; for an iterable that is neither a list nor a
            tuple, an iterator. ``outputs`` itself when scaling is disabled.

        Raises:
            ValueError: something in ``outputs`` is not a tensor.
            RuntimeError: a loop over ``attempts`` came before, and no ``step`` since.
        """
        if not self._enabled:
            return outputs
        if self._operations.is_tensor(outputs):
            if self._closures.attempted:
                self._closures.check_outside()
            if self._awaiting:
                self._note_another_loss()
            state = self._state or self._place(outputs.device)
            for observer in self._observers:
                observer.scaled(outputs)
            scaled = self._operations.multiply(outputs, self._in_use(state).scale)
            if self._closures.losses is not None:
                self._closures.losses.append((scaled, outputs))
            return scaled
        if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
            raise ValueError(
                f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}"
            )
        if hasattr(outputs, "_fields"):
            return type(outputs)(*map(self.scale, outputs))
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        return map(self.scale, outputs)

    def unscale_(self, optimizer: OptimizerT) -> None:
        """Divide the optimizer's gradients by the loss scale, in place, and check them.

        Optional: ``step`` does it where you did not. Call it once per optimizer and iteration,
        after the last backward pass, to see or change the true gradients.

        Raises:
            RuntimeError: it was called before, or after ``step``, in this iteration; in a loop over
                ``attempts``; or no loss was scaled yet.
            ValueError: a gradient is float16, and float16 gradients were not allowed.
        """
        if not self._enabled:
            return
        if self._closures.in_loop:
            raise self._closures.refusal("unscale_")
        state = self._placed_state("unscale_", optimizer)
        record = self._record(optimizer)
        record.check("unscale_")
        if record.is_scaled:
            self._divide(optimizer, record, record.made_with or state)
        else:  # clip_grad_norm_() has done it
            record.move("unscale_")

    def step(
        self, optimizer: OptimizerT, *args: Any, max_retries: int | None = None, **kwargs: Any
    ) -> Any:
        """Unscale the gradients if ``unscale_`` did not, then step, or skip on overflow.

        A closure (``step(optimizer, closure)``) zeroes the gradients, computes the loss, calls
        ``scaler.scale(loss).backward()``, and returns the loss, scaled or not. Each evaluation is
        unscaled and checked before the optimizer sees it, and the optimizer is handed the
        unscaled loss. An evaluation that overflows is repeated at a backed-off scale, up to
        ``max_retries`` times; then the step is skipped, and parameters and optimizer state are
        put back. A copy of both is held during such a step. The closure is to make the gradients
        of this optimizer alone: another's may need another scale.

        Args:
            optimizer: the optimizer that owns the gradients.
            args: for ``optimizer.step``.
            max_retries: bounds the repetitions of an evaluation, in place of the scaler's own
                setting.
            kwargs: for ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns, or None if the step was skipped.

        Raises:
            RuntimeError: it was called before in this iteration, in a closure, or in a loop over
                ``attempts``; no loss was scaled yet; or the last call was interrupted.
            ValueError: as ``unscale_`` does.
        """
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._outcomes.put(owner_of(optimizer), StepOutcome(1.0, False, "disabled"))
            return result
        closure = None
        if args or kwargs:
            closure, args, kwargs = _take_closure(args, kwargs)
        record = self._record_to_step(optimizer)
        if closure is not None:
            if record.clip_coefficient is not None:
                raise CallOrderError(
                    "clip_grad_norm_() was called before step(optimizer, closure), whose closure "
                    "makes new gradients: call it in the closure, after the backward pass"
                )
            retries = self._max_retries if max_retries is None else _check_retries(max_retries)
            return self._step_with_closure(optimizer, closure, retries, args, kwargs)
        state = record.made_with or self._placed_state("step", optimizer)
        if self._observers:
            self._announce_step(optimizer, record, state)
        try:
            return self._step_or_skip(optimizer, record, state, args, kwargs)
        except BaseException as error:
            self._note_raised(optimizer, error)
            raise

    def update(self, new_scale: float | TensorT | None = None) -> None:
        """Move the scale by the policy, from what this iteration's checks found.

        Any optimizer's overflow makes it a non-finite step. Where no optimizer had gradients, it
        was not a step, and nothing moves. Call it once, after the last ``step``.

        Args:
            new_scale: set the scale to this instead: a number, or a tensor of one element.

        Raises:
            RuntimeError: nothing was checked since the last call; or gradients are to be clipped in
                a ``step`` that did not come.
            ValueError, TypeError: ``new_scale`` cannot be a loss scale; nothing changes.
        """
        if not self._enabled:
            return
        self._move(new_scale)
        for observer in self._observers:
            observer.updated()

    def minimize(self, optimizer: OptimizerT, scaled_loss: TensorT | None = None) -> Any:
        """``step(optimizer)`` and ``update()`` in one call, after the backward pass.

        Args:
            optimizer: the optimizer that owns the gradients.
            scaled_loss: unused; it lets a call written for Paddle's scaler work as it stands.

        Returns:
            What ``step`` returns.
        """
        result = self.step(optimizer)
        self.update()
        return result

    # What the frameworks' own scalers do not have.

    def attempts(
        self,
        *optimizers: OptimizerT,
        max_retries: int | None = None,
        buffers: Iterable[TensorT] = (),
    ) -> Iterator[int]:
        """Loop over forward and backward until the gradients are finite: the batch is not lost.

        ::

            for micro_batch in batch:
                for _ in scaler.attempts(optimizer):
                    loss = loss_of(model, micro_batch) / len(batch)
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        After the loop's body, the gradients are checked. If they overflowed, those from before the
        body are put back, the scale backs off, and the body runs again. So each contribution counts
        once, and gradients that were accumulated before it are kept: multiplied by the ratio of the
        scales, which is exact for powers of two, and by which ``step`` knows to divide. A
        repetition draws the same random numbers from the framework's own generators.

        When retries are used up, the gradients stay non-finite, and ``step`` skips. ``break``, or
        an exception, ends the attempts with the gradients as they are; ``step`` checks them, as
        ever. With scaling disabled the body runs once.

        Zero the gradients before the loop, not in it; clip after it. Each attempt waits for the
        device. A copy of gradients that were there before is held meanwhile.

        Args:
            optimizers: all that own parameters which the losses of the body reach.
            max_retries: bounds the repetitions, in place of the scaler's own setting.
            buffers: further tensors that a repetition puts back, such as ``model.buffers()``, where
                batch normalization keeps its statistics.

        Returns:
            An iterator of the number of each attempt, from 0.

        Raises:
            RuntimeError: it was called after ``unscale_``, ``clip_grad_norm_`` or ``step`` in this
                iteration, in a closure, or in another such loop; or the body scaled no loss.
            ValueError: there are other processes, and nothing tells who repeats together.
            TypeError: an argument is not what it should be.
        """
        for optimizer in optimizers or (None,):
            if not hasattr(optimizer, "step"):
                raise TypeError(
                    "attempts() takes the optimizers whose gradients the loop makes, such as "
                    f"attempts(optimizer), got {type(optimizer).__name__}"
                )
        retries = self._max_retries if max_retries is None else _check_retries(max_retries)
        kept = list(buffers)
        for each in kept:
            if not self._operations.is_tensor(each):
                raise TypeError(
                    f"buffers must be tensors, such as model.buffers(), got {type(each).__name__}"
                )
        if not self._enabled:
            return iter((0,))
        if self._closures.losses is not None:
            raise self._closures.refusal("attempts")
        records = {id(record.optimizer): record for record in map(self._record, optimizers)}
        for record in records.values():
            record.check("attempts")
            self._repeaters(record.optimizer)
        attempted = self._closures.attempted
        others = {key: each for key, each in attempted.items() if each.stage is not Stage.STEPPED}
        self._closures.attempted = others | records
        self._records |= records
        return AttemptLoop(
            list(records.values()),
            kept,
            retries,
            self._operations,
            self._closures,
            lambda: self._placed_state("update"),  # the one in force
            self._policy if self._scale_moves() else None,
            lambda record: self._decision(
                record, self._repeaters(record.optimizer), self._check(record.optimizer), None
            )[0],
        ).run()

    def clip_grad_norm_(
        self,
        optimizer: OptimizerT,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        shards: Any = None,
    ) -> TensorT:
        """Clip the unscaled gradients of an optimizer by their total norm.

        ``step`` multiplies them by ``min(1, max_norm / (norm + 1e-6))``, unless it is skipped.
        A 2-norm takes one reading of the gradients, and ``step`` divides them by the scale in the
        same multiplication; other norms unscale them here. Until ``step``, gradients stay as they
        are: to see or change them, call ``unscale_`` first. A second call clips what the first
        has left; the framework's own clipping does not see it. The gradients of a skipped step
        are not clipped, and may still be scaled. With a closure, call it in the closure.

        Args:
            optimizer: the optimizer that owns the gradients.
            max_norm: the largest norm to let through, >= 0; inf only measures.
            norm_type: the p of the p-norm; inf for the largest magnitude.
            error_if_nonfinite: raise where the norm is NaN or Inf; processes that decide together
                raise together, which takes one more all-reduce.
            shards: the process group of those who hold other parts of the model, whose norms are
                part of the total; PyTorch and Paddle alone.

        Returns:
            The total norm of the unscaled gradients, a scalar tensor.

        Raises:
            RuntimeError: ``step`` was called before in this iteration; no loss was scaled yet; or
                the norm is not finite and ``error_if_nonfinite`` is True.
            ValueError: ``max_norm`` is negative or NaN; or as ``unscale_`` does.
            TypeError: ``shards`` is not a process group, or this framework has none.
        """
        if not float(max_norm) >= 0:
            raise ValueError(f"max_norm must be >= 0, got {max_norm!r}")
        if shards is not None and not self._knows_process_groups:
            raise TypeError(f"{type(self).__module__} knows no process groups: leave out shards")
        if self._enabled:
            self._placed_state("clip_grad_norm_", optimizer)
        try:
            norm: TensorT = self._clip(
                optimizer, float(max_norm), norm_type, error_if_nonfinite, shards
            )
        except BaseException as error:
            self._note_raised(optimizer, error)
            raise
        return norm

    def last_step(self, optimizer: OptimizerT) -> StepOutcome:
        """What happened in the optimizer's latest step through this scaler.

        Raises:
            RuntimeError: there was none.
        """
        outcome = self._outcomes.get(optimizer)
        if outcome is None:
            raise CallOrderError(
                "last_step() has nothing to report for this optimizer: call step(optimizer) first"
            )
        return outcome

    @property
    def history(self) -> tuple[StepOutcome, ...]:
        """What happened in the latest 1,000 steps of all optimizers, the latest last.

        Nothing waits for the device until an outcome is asked.
        """
        return tuple(self._history)

    # What observers and diagnosis need; a training loop does not.

    def add_observer(self, observer: Observer) -> None:
        """Announce each call to an observer from now on. A copy of the scaler has no observers."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Announce nothing more to an observer; nothing happens if it does not observe."""
        if observer in self._observers:
            self._observers.remove(observer)

    @property
    def observed(self) -> ObservedScaler[TensorT, OptimizerT]:
        """What an observer may ask of this scaler."""
        return ObservedScaler(self)

    # What an adapter supplies or may override: three class attributes, two methods, and what a
    # framework does in its own way. An adapter may also override a public method whose signature
    # or rules differ in its framework, and what is pickled.

    _operations: ClassVar[Operations]
    _record_type: ClassVar[type[OptimizerRecord]] = OptimizerRecord
    _knows_process_groups: ClassVar[bool] = False

    @abstractmethod
    def _set_scale(self, new_scale: Any) -> None:
        """Set the scale by hand."""

    @abstractmethod
    def _check(self, optimizer: Optimizer) -> FoundInf:
        """Flag the gradients that are not finite; all stay as they are."""

    def _scale_moves(self) -> bool:
        """Whether the policy is asked for the next scale at all."""
        return True

    def _move(self, new_scale: float | TensorT | None = None) -> None:
        """Move the scale, and end the iteration."""
        if self._closures.losses is not None:
            raise self._closures.refusal("update")
        state = self._placed_state("update")
        if self._awaiting and any(record.awaits_step for record in self._awaiting):
            raise CallOrderError(
                "update() was called after clip_grad_norm_(), which clips in step(optimizer), and "
                "without that step: call scaler.step(optimizer) in place of optimizer.step()"
            )
        for observer in self._observers:
            observer.updating()
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            # Once decided, an update that is interrupted and repeated moves to the same state.
            if self._records.next_state is None:
                self._records.next_state = self._next_state(state)
            self._state = self._operations.move(state, self._records.next_state)
        self._end_iteration()

    def _next_state(self, state: State) -> State:
        """The state after this iteration, by what its checks found; nothing has moved yet."""
        found_infs, is_checked = [], False
        for record in self._records.values():
            if record.found_inf:
                found_infs.append(record.found_inf)
            elif record.found_inf is not None or record.stage is Stage.INTERRUPTED:
                is_checked = True  # there were no gradients, or nothing is to move
        if not found_infs and not is_checked:
            raise CallOrderError(
                "No inf checks were recorded prior to update(): call step(optimizer) or "
                "unscale_(optimizer) before update()"
            )
        if self._closures.open_loop is not None:
            overflowed = any(map(self._operations.any_set, found_infs))
            self._closures.close_loop(keeps_scale=bool(found_infs) and not overflowed)
        state = self._closures.backed_off or state
        if not found_infs:
            return state
        return self._operations.next_state(self._policy, state, found_infs, self._amaxes())

    def _place(self, device: Any) -> State:
        """Put the state on the device of the first scaled tensor."""
        self._state = self._operations.place(self._initial_state, device)
        return self._state

    def _unscale_gradients(self, optimizer: Optimizer, inv_scale: Any) -> FoundInf:
        """Divide gradients by the scale in place, and flag those that are not finite."""
        return self._operations.unscale_(optimizer, inv_scale)

    def _parts(self, optimizer: Optimizer, shards: Any) -> Any:
        """What a norm is put together from, for the two methods below.

        It is asked before any gradient changes, so it may raise.
        """
        return shards

    def _measure(self, record: OptimizerRecord, parts: Any, deciders: Any = None) -> Tensor | None:
        """The norm that the gradients will have once unscaled, if one reading of them can tell."""
        scale = self._scale_to_clip(record)
        measured = self._operations.measure(record.optimizer, scale)
        if measured is None:
            return None
        norm, record.scale, record.inv_scale, found_inf = measured
        self._settle(record, deciders, found_inf, scale)
        record.move("measured")
        return norm

    def _total_norm(self, optimizer: Optimizer, norm_type: float, parts: Any) -> Tensor:
        """The norm of unscaled gradients, those of the processes that hold other parts included."""
        return self._operations.total_norm(optimizer, norm_type)

    def _deciders(self, optimizer: Optimizer) -> Any:
        """The processes that decide about this optimizer together; None for this one alone.

        It is asked before any gradient changes, so it may raise.
        """
        return None

    def _repeaters(self, optimizer: Optimizer) -> Any:
        """The deciders, where all that repeat a loop's body together are known to be among them.

        It is asked before any gradient changes, so it may raise.
        """
        return self._deciders(optimizer)

    def _decision(
        self, record: OptimizerRecord, deciders: Any, found_inf: FoundInf, amax: Tensor | None
    ) -> tuple[FoundInf, Tensor | None]:
        """What all that decide together found, from what this process found."""
        return found_inf, amax

    def _is_anywhere(self, optimizer: Optimizer, flag: bool) -> bool:
        """Whether a flag is True on any of those that decide about this optimizer together."""
        return flag

    def _step_or_skip(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step without a closure, and record what happened."""
        record = self._unscaled(record, state)
        result = self._step_if_finite(optimizer, record, args, kwargs)
        self._conclude(optimizer, record)
        return result

    def _step_if_finite(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer, its gradients unscaled, if it has any and they are finite."""
        if record.found_inf is None:  # a subclass or its user set the stage alone
            raise CallOrderError(
                "No inf checks were recorded for this optimizer: set its found_inf_per_device with "
                "its stage, or call unscale_(optimizer)"
            )
        if not record.found_inf:
            return None
        record.overflowed = self._operations.any_set(record.found_inf)
        if record.overflowed:
            return None
        # Asked here too, because a call that does nothing counts in a small step.
        if record.inv_scale is not None or record.clip_coefficient is not None:
            self._apply_pending(record)
        return record.apply(optimizer.step, *args, **kwargs)

    def _conclude(
        self, optimizer: Optimizer, record: OptimizerRecord, reason: Reason | None = None
    ) -> None:
        """Record what happened, once nothing can raise any more."""
        found_inf = record.found_inf
        if found_inf is not None and not found_inf:
            reason = "no_gradients"
        scale = record.scale
        if scale is None:  # a subclass has an unscale_ of its own
            scale = self._operations.copy(record.made_with or self._placed_state("step")).scale
        if record.is_exhausted and self._operations.any_set(found_inf or {}):
            reason = "retries_exhausted"
        flag: bool | Callable[[], bool] | None = record.overflowed
        if flag is None:
            flag = self._operations.readable(found_inf) if found_inf else False
        record.stage = Stage.STEPPED
        self._records[id(record.optimizer)] = record
        outcome = StepOutcome(scale, flag, reason)
        self._outcomes.put(record.optimizer, outcome)
        self._history.append(outcome)
        for observer in self._observers:
            observer.stepped(optimizer, outcome)

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._enabled:
            return f"<{name} disabled>"  # torch's has no parentheses either, and trainers match it
        state = self._host_state()
        return (
            f"{name}(scale={float(state.scale)!r}, finite_steps={int(state.finite_steps)}, "
            f"nonfinite_steps={int(state.nonfinite_steps)}, policy={self._policy!r})"
        )

    # Pickling and copying.

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise CallOrderError(
                "a scaler may only be pickled or copied at the beginning of an iteration, or at "
                "the end: call update() first"
            )
        left_out = dict.fromkeys(
            ("_state", "_records", "_outcomes", "_history", "_observers", "_closures", "_awaiting")
        )
        return {**self.__dict__, **left_out, "_initial_state": self._host_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_records()

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerScaler[TensorT, OptimizerT]:
        group = getattr(self, "_group", None)
        memo[id(group)] = group  # a process group cannot be copied, and copies decide together, too
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copying.deepcopy(self.__getstate__(), memo))
        return copied

    # Shared steps.

    def _divide(self, optimizer: Optimizer, record: OptimizerRecord, state: State) -> None:
        """Divide gradients that are scaled by the scale of ``state``, and check them."""
        deciders = self._deciders(optimizer)
        if self._observers:
            self._announce_unscale(optimizer, state)
        try:
            record.scale, inv_scale = self._operations.inverse(self._in_use(state).scale)
            found_inf = self._unscale_gradients(optimizer, inv_scale)
            if record.stage is not Stage.MEASURED:  # or all have decided
                self._settle(record, deciders, found_inf)
            record.inv_scale = None
            record.move("unscale_")
            self._records[id(record.optimizer)] = record
        except BaseException as error:
            self._note_interrupt(record, error)
            raise

    def _settle(
        self,
        record: OptimizerRecord,
        deciders: Any,
        found_inf: FoundInf,
        scale: Tensor | None = None,
    ) -> None:
        """Record what all that decide together found in gradients; ``scale`` if still scaled."""
        amax = None
        # Asked here too, because a call that does nothing counts in a small step.
        if amax_interval(self._policy) and self._amax_is_due(found_inf):
            amax = self._operations.amax(record.optimizer, scale)
        record.found_inf, record.amax = self._decision(record, deciders, found_inf, amax)

    def _amax_is_due(self, found_inf: FoundInf) -> bool:
        """Whether the policy looks at the largest gradient of this step."""
        interval = amax_interval(self._policy)
        if not interval:
            return False
        steps = self._finite_steps()
        return steps is None or not (steps % interval or self._operations.any_set(found_inf))

    def _finite_steps(self) -> int | None:
        """The count that the policy will look at, if that is known on the host."""
        return self._operations.finite_steps(self._in_use(self._placed_state("step")))

    def _amaxes(self) -> list[Tensor]:
        """The optimizers' largest gradients, for a policy that looks at them."""
        if not amax_interval(self._policy):
            return []
        return [record.amax for record in self._records.values() if record.amax is not None]

    def _start_records(self) -> None:
        """Start without steps and without observers."""
        self._records = Records(self._record_type)
        self._outcomes = Outcomes()
        self._history: deque[StepOutcome] = deque(maxlen=HISTORY_LENGTH)
        self._observers: list[Observer] = []
        self._closures = Closures()
        self._awaiting: list[OptimizerRecord] = []  # those that another loss outdates

    def _host_state(self) -> State:
        """The state in host scalars; waits for the device."""
        return self._initial_state if self._state is None else self._operations.read(self._state)

    def _record(self, optimizer: Optimizer) -> OptimizerRecord:
        """The optimizer's record, or a new one that is not kept yet."""
        owner = owner_of(optimizer)
        if owner is not optimizer and self._enabled:
            self._records.wrap(optimizer, owner)
        record = self._records.get(id(owner))
        if record is None:
            record = self._record_type()
        elif record.stage is Stage.INTERRUPTED and self._operations.are_new(
            self._operations.current_gradients(owner), record.stale or []
        ):
            record = self._record_type()  # all come from another loss
        if not hasattr(owner, "step"):
            raise TypeError(
                "a scaler takes the optimizer that owns the gradients, as in "
                "scaler.clip_grad_norm_(optimizer, max_norm), scaler.unscale_(optimizer) and "
                f"scaler.step(optimizer), got {type(optimizer).__name__}"
            )
        record.optimizer = owner
        return record

    def _keep(self, record: OptimizerRecord) -> None:
        self._records[id(record.optimizer)] = record

    def _record_to_step(self, optimizer: Optimizer) -> OptimizerRecord:
        """The record of an optimizer that has not stepped in this iteration."""
        if self._closures.losses is not None:
            raise self._closures.refusal("step")
        record = self._record(optimizer)
        record.check("step")
        return record

    def _clip(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        shards: Any,
    ) -> Any:
        """Measure the norm, and have the gradients multiplied in ``step``."""
        if self._closures.in_loop:
            raise self._closures.refusal("clip_grad_norm_")
        record = self._record(optimizer)
        record.check("clip_grad_norm_")
        if record.is_outdated:
            raise CallOrderError(UNKNOWN_GRADIENTS)
        parts = self._parts(optimizer, shards)
        if record.clip_coefficient is not None:  # of an earlier call
            self._apply_pending(record)
        norm: Tensor | None = None
        if self._enabled and record.stage is Stage.SCALED and norm_type == 2:
            norm = self._measure(record, parts)
        if self._enabled and norm is None and record.is_scaled:
            self.unscale_(optimizer)
            record = self._record(optimizer)
            record.move("unscaled to clip")
        if norm is None:
            norm = self._total_norm(optimizer, float(norm_type), parts)
        if error_if_nonfinite:
            if self._enabled:
                self._keep(record)  # update() backs off from what was found, also after the error
            self._check_finite(record, norm, norm_type)
        coefficient = self._operations.clip_coefficient(max_norm, norm)
        if self._enabled:
            self._awaiting.append(record)
            record.clip_coefficient = None if math.isinf(max_norm) else coefficient
            self._keep(record)
        else:  # step() is not ours then: clip at once
            self._operations.multiply_gradients_(optimizer, coefficient)
        return norm

    def _check_finite(self, record: OptimizerRecord, norm: Tensor, norm_type: float) -> None:
        """Raise on all processes where the norm or a gradient of one is not finite.

        Their norms may differ, and a norm of finite gradients may overflow.
        """
        is_finite = math.isfinite(float(norm))
        is_bad = not is_finite or self._operations.any_set(record.found_inf or {})
        if not self._is_anywhere(record.optimizer, is_bad):
            return
        elsewhere = " here, and not finite on another process" if is_finite else ""
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(norm)}{elsewhere}, so "
            "they cannot be clipped; with error_if_nonfinite=False the step is skipped instead"
        )

    def _end_iteration(self) -> None:
        """Forget what is known of the gradients."""
        self._closures.backed_off = self._closures.open_loop = None
        self._closures.attempted.clear()
        self._awaiting.clear()
        self._records = Records(self._record_type)  # last: until then, update() may be repeated

    def _forget_next_state(self) -> None:
        """Drop what an interrupted call would make of a state that is set from outside."""
        self._closures.backed_off = None
        self._records.next_state = None

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        max_retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run = ClosureRun(
            optimizer,
            closure,
            max_retries,
            self._operations,
            self._records,
            self._closures,
            lambda: self._placed_state("step"),
            self._policy if self._scale_moves() else None,
            self.unscale_,
            self._apply_pending,
            lambda flag: self._is_anywhere(optimizer, flag),
        )
        result, record, reason = run.step(args, kwargs)
        self._conclude(optimizer, record, reason)
        return result

    def _note_interrupt(self, record: OptimizerRecord, error: BaseException) -> None:
        """Remember that only some gradients may be unscaled.

        An adapter that refuses gradients raises one of these types before it changes any.
        """
        if not isinstance(error, (ValueError, NotImplementedError, AttributeError)):
            record.interrupt(self._operations.current_gradients(record.optimizer))
            self._keep(record)

    def _note_raised(self, optimizer: Optimizer, error: BaseException) -> None:
        """Allow a call that raised to be repeated, until another loss is scaled."""
        record = self._records.get(id(owner_of(optimizer)))
        if record is not None and record.result:
            record.stage = Stage.STEPPED  # it came after the optimizer's step
        elif record is not None and record.result is not None and not isinstance(error, Exception):
            # An interrupt: the optimizer may have applied some gradients, or all.
            record.interrupt(self._operations.current_gradients(record.optimizer))
            self._awaiting.append(record)
        elif record is not None and record.stage in _KNOWN:
            record.has_raised = True
            self._awaiting.append(record)

    def _note_another_loss(self) -> None:
        """Mark what is known of gradients as outdated: another loss may change them."""
        for record in self._awaiting:
            record.is_outdated = True
            is_known = record.has_raised and record.stage in _KNOWN
            if is_known or record.stage is Stage.INTERRUPTED:  # those that were not cleared
                record.interrupt(self._operations.current_gradients(record.optimizer))
        self._awaiting.clear()

    def _announce_unscale(self, optimizer: Optimizer, state: State) -> None:
        if self._closures.losses is None:  # a closure may be called again
            for observer in self._observers:
                observer.unscaling(optimizer, state.scale)

    def _announce_step(self, optimizer: Optimizer, record: OptimizerRecord, state: State) -> None:
        for observer in self._observers:
            observer.stepping(optimizer, state.scale if record.is_scaled else None)

    def _placed_state(self, caller: str, optimizer: Optimizer | None = None) -> State:
        if self._state is None:
            raise CallOrderError(
                f"{caller}() was called before any loss was scaled: call "
                "scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._state

    def _scale_to_clip(self, record: OptimizerRecord) -> Tensor:
        """The scale that the gradients to be clipped were made with."""
        return self._in_use(record.made_with or self._placed_state("clip_grad_norm_")).scale

    def _in_use(self, state: State) -> State:
        """The state that backward passes use: a closure's may be backed off before update()."""
        closures = self._closures
        return state if closures.losses is None else closures.backed_off or state

    def _unscaled(self, record: OptimizerRecord, state: State) -> OptimizerRecord:
        """The record of gradients that are unscaled; they were scaled by the scale of ``state``."""
        if record.stage is Stage.MEASURED and not self._operations.any_set(record.found_inf or {}):
            self._apply_pending(record)
        elif record.is_scaled:
            if self._unscale_is_own():
                self._divide(record.optimizer, record, state)
            else:
                self.unscale_(record.optimizer)
                record = self._record(record.optimizer)
        return record

    def _unscale_is_own(self) -> bool:
        """Whether nothing replaces ``unscale_``, as a subclass may."""
        return getattr(self.unscale_, "__func__", None) is EagerScaler.unscale_

    def _apply_pending(self, record: OptimizerRecord) -> None:
        """Multiply the gradients by what is pending: 1/scale, the clip coefficient, or both."""
        if record.clip_coefficient is None and record.inv_scale is None:
            return
        factor = record.pending()
        try:
            self._operations.multiply_gradients_(record.optimizer, factor)
            record.clip_coefficient = record.inv_scale = None
            record.move("multiplied")
        except BaseException as error:
            self._note_interrupt(record, error)
            raise


class ObservedScaler(Generic[TensorT, OptimizerT]):
    """What an observer may ask of a scaler, under names that no subclass of a scaler can need.

    Each answer is of the moment; those that may wait for the device say so.
    """

    def __init__(self, scaler: EagerScaler[TensorT, OptimizerT]) -> None:
        self._scaler = scaler

    @property
    def is_enabled(self) -> bool:
        """Whether losses are scaled at all."""
        return self._scaler._enabled

    @property
    def policy(self) -> Policy:
        """The rule by which the scale moves; a ``FixedScale`` if it does not."""
        moves = self._scaler._scale_moves()
        return self._scaler._policy if moves else FixedScale(float(self.state.scale))

    @property
    def state(self) -> State:
        """The scale and its counters as host scalars; waits for the device."""
        return self._scaler._host_state()

    @property
    def is_in_closure(self) -> bool:
        """Whether ``step`` is calling a closure, again if its gradients overflow."""
        return self._scaler._closures.losses is not None

    def last_steps(self) -> list[tuple[OptimizerT, StepOutcome]]:
        """Each optimizer that has stepped through the scaler, with its latest step."""
        return self._scaler._outcomes.all()

    def total_norm(self, optimizer: OptimizerT) -> float:
        """The 2-norm of an optimizer's gradients as they are, scaled or not; waits for it."""
        return float(self._scaler._operations.total_norm(optimizer, 2.0))


def _take_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """Split off a closure given by position or by name; None stands for no closure."""
    if "closure" in kwargs:
        kwargs = dict(kwargs)
        return kwargs.pop("closure"), args, kwargs
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def _check_retries(max_retries: object) -> int:
    if isinstance(max_retries, bool) or not isinstance(max_retries, int):
        raise TypeError(f"max_retries must be an integer, got {max_retries!r}")
    if max_retries < 0:
        raise ValueError(f"max_retries must be at least 0, got {max_retries!r}")
    return max_retries
