"""The eager scaler: scale, unscale, step or skip, update. Once, for every eager framework."""

from __future__ import annotations

import copy as copying
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, overload

from gradscaler._eager.gradients import Gradients, Iteration, Scaling, Unscaler
from gradscaler._eager.observed import ObservedScaler
from gradscaler._eager.operations import FoundInf, Operations, Optimizer
from gradscaler._eager.outcomes import Outcomes
from gradscaler._eager.processes import ALONE, Processes
from gradscaler._eager.repeating import AttemptLoop, ClosureStep, Repeating, Repetition
from gradscaler._eager.stages import Stage
from gradscaler._eager.stepping import PLAIN, Stepping
from gradscaler.errors import CallOrderError
from gradscaler.outcome import HISTORY_LENGTH, Observer, Reason, StepOutcome
from gradscaler.policies import Policy, State

TensorT = TypeVar("TensorT")
OptimizerT = TypeVar("OptimizerT", bound=Any)


class EagerScaler(ABC, Generic[TensorT, OptimizerT]):
    """Loss scaling for one training loop: the order of things. An adapter adds its spelling.

    Each optimizer has its ``Gradients``, whose stage says what is true of them, until ``update``
    ends the iteration. Only ``update`` moves the scale, so gradients are unscaled by the scale that
    their loss was scaled by. found_inf is each optimizer's own, and any of them moves the scale.
    """

    def __init__(self, policy: Policy, enabled: bool, max_retries: int) -> None:
        self._policy = policy
        self._enabled = enabled
        self._max_retries = _check_retries(max_retries)
        self._initial_state = policy.init()
        self._state: State | None = None  # placed where the first scaled tensor lives
        self._start()

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
        if not self._operations.is_tensor(outputs):
            return _mapped(self.scale, outputs)
        repeating = self._repeating
        if self._iteration:
            known = self._iteration.known()
            repeating.must_scale_in_loop(known)
            for gradients in known:
                gradients.note_loss()  # its backward pass may add to them
        # Only the first loss tells the device; a scaler is made before the model is moved.
        state = self._state or self._place(outputs.device)
        for observer in self._observers:
            observer.scaled(outputs)
        scaled = self._operations.multiply(outputs, repeating.state_in_use(state).scale)
        if repeating.losses is not None:
            repeating.losses.append((scaled, outputs))
        return scaled

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
        self._repeating.must_not_loop("unscale_")
        gradients = self._iteration.of(optimizer)
        scaling = self._scaling_of(gradients, "unscale_")
        gradients.must_allow("unscale_")
        if not gradients.is_scaled:  # clip_grad_norm_() has done it
            gradients.move("unscaled")
            return
        self._divide(optimizer, gradients, scaling)

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
            # last_step() answers for a disabled scaler, too.
            self._outcomes.put(optimizer, StepOutcome(1.0, False, "disabled"))
            return result
        closure = None
        if args or kwargs:
            closure, args, kwargs = _take_closure(args, kwargs)
        if closure is not None:
            retries = self._max_retries if max_retries is None else _check_retries(max_retries)
            return self._step_with_closure(optimizer, closure, retries, args, kwargs)
        return self._take_step(optimizer, self._stepping_of(optimizer), args, kwargs)

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
        self._repeating.must_not_run("update")
        state = self._state_in_force("update")
        self._iteration.must_await_no_step()
        for observer in self._observers:
            observer.updating()
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            # Once decided, an update that is interrupted and repeated moves to the same state.
            if self._iteration.next_state is None:
                self._iteration.next_state = self._next_state(state)
            self._state = self._operations.move(state, self._iteration.next_state)
        self._end_iteration()
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
        _check_optimizers(optimizers)
        retries = self._max_retries if max_retries is None else _check_retries(max_retries)
        kept = list(buffers)
        for each in kept:
            if not self._operations.is_tensor(each):
                raise TypeError(
                    f"buffers must be tensors, such as model.buffers(), got {type(each).__name__}"
                )
        if not self._enabled:
            return iter((0,))
        self._repeating.must_not_run("attempts")
        made = {id(each.optimizer): each for each in map(self._iteration.of, optimizers)}
        for gradients in made.values():
            gradients.must_allow("attempts")
            self._processes.repeaters_of(gradients.optimizer)  # now, as it may refuse
        for gradients in made.values():  # only now, as nothing can refuse any more
            gradients.is_attempted = True
        self._iteration |= made
        repetition = self._repetition(retries)
        return AttemptLoop(list(made.values()), kept, repetition, self._check).run()

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
        clip = self._clip if self._enabled else self._clip_at_once
        try:
            norm: TensorT = clip(optimizer, float(max_norm), norm_type, error_if_nonfinite, shards)
        except BaseException as error:
            self._iteration.note_raised(optimizer, error)
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

    # What an adapter supplies. It may also override a public method whose signature or rules
    # differ in its framework, and what is pickled.

    _operations: ClassVar[Operations]
    _gradients_type: ClassVar[type[Gradients]] = Gradients
    _processes: Processes = ALONE

    @abstractmethod
    def _unscaler(self, optimizer: Optimizer) -> Unscaler:
        """How the optimizer's gradients are unscaled; what users replaced is looked for here."""

    @abstractmethod
    def _set_scale(self, new_scale: Any) -> None:
        """Set the scale by hand."""

    def _stepping_of(self, optimizer: Optimizer) -> Stepping:
        """How the optimizer is stepped; what users replaced is looked for here."""
        return PLAIN

    def _scale_moves(self) -> bool:
        """Whether the policy is asked for the next scale at all."""
        return True

    def _place(self, device: Any) -> State:
        """Put the state on the device of the first scaled tensor."""
        self._state = self._operations.place(self._initial_state, device)
        return self._state

    def _place_before_loss(self, optimizer: Optimizer) -> None:
        """Place the state where another process may have scaled the loss."""

    def _state_of_loss(self, state: State) -> State:
        """The state whose scale the latest loss was multiplied by, where ``state`` is in force."""
        return state

    # The steps that public calls share.

    def _state_in_force(self, call: str) -> State:
        """The state that ``update`` moves."""
        if self._state is None:
            raise CallOrderError(
                f"{call}() was called before any loss was scaled: call "
                "scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._state

    def _scaling_of(self, gradients: Gradients, call: str) -> Scaling:
        """What gradients were multiplied by; a closure's or a loop's may be backed off."""
        if self._state is None:
            self._place_before_loss(gradients.optimizer)
        # Two states: the scale may have moved since their loss, or a loop backed off, but all
        # processes hold the one in force, and decide by it.
        state = self._state_in_force(call)
        made_with = gradients.made_with or self._state_of_loss(state)
        if self._repeating.losses is not None and self._repeating.backed_off is not None:
            made_with = state = self._repeating.backed_off
        return Scaling(made_with.scale, state, getattr(self._policy, "amax_interval", 0))

    def _take_step(
        self,
        optimizer: Optimizer,
        stepping: Stepping,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step without a closure, or skip, and record what happened."""
        self._repeating.must_not_run("step")
        gradients = self._iteration.of(optimizer)
        gradients.must_allow("step")
        scaling = self._scaling_of(gradients, "step")
        for observer in self._observers:
            observer.stepping(optimizer, scaling.scale if gradients.is_scaled else None)
        try:
            if gradients.is_scaled and not stepping.takes_scaled:
                gradients = self._unscaled(optimizer, gradients, scaling)
            result = stepping.step(optimizer, gradients, scaling, args, kwargs)
            # A fused step checks what was not kept yet, and users' methods may keep others.
            self._conclude(optimizer, self._iteration.kept(gradients))
        except BaseException as error:
            self._iteration.note_raised(optimizer, error)
            raise
        return result

    def _unscaled(self, optimizer: Optimizer, gradients: Gradients, scaling: Scaling) -> Gradients:
        """The gradients once unscaled, for a step, by ``unscale_`` if a subclass replaces it."""
        if gradients.are_measured:
            gradients.overflowed = gradients.have_overflowed
        # Those that overflowed are divided, too, so that a skip leaves what unscale_() leaves.
        if gradients.overflowed is False:
            gradients.multiply()
        elif getattr(self.unscale_, "__func__", None) is EagerScaler.unscale_:
            # A shortcut: step() has asked all that unscale_() asks.
            self._divide(gradients.optimizer, gradients, scaling)
        else:
            self.unscale_(gradients.optimizer)
            return self._iteration.kept(gradients)
        return gradients

    def _divide(self, optimizer: Optimizer, gradients: Gradients, scaling: Scaling) -> None:
        """Divide gradients by the scale, and check them."""
        deciders = self._processes.deciders_of(gradients.optimizer)  # first, as it may refuse
        if not self._repeating.is_running:  # a closure may be called again
            for observer in self._observers:
                observer.unscaling(optimizer, scaling.scale)
        is_new = self._iteration.get(id(gradients.optimizer)) is not gradients
        self._iteration.keep(gradients)  # before they change, so that an interrupt is remembered
        try:
            gradients.unscale(scaling, self._unscaler(optimizer), deciders)
        except BaseException:
            if is_new and gradients.is_scaled:  # they were refused, and nothing has happened
                self._iteration.drop(gradients)
            raise

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        max_retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._repeating.must_not_run("step")
        gradients = self._iteration.of(optimizer)
        gradients.must_allow("step")
        if gradients.clip_coefficient is not None:
            raise CallOrderError(
                "clip_grad_norm_() was called before step(optimizer, closure), whose closure "
                "makes new gradients: call it in the closure, after the backward pass"
            )
        step = ClosureStep(
            optimizer,
            closure,
            id(gradients.optimizer),
            self._repetition(max_retries),
            self._iteration,
            self._processes,
            self.unscale_,
        )
        result, gradients, reason = step.step(args, kwargs)
        self._conclude(optimizer, gradients, reason)
        return result

    def _conclude(
        self, optimizer: Optimizer, gradients: Gradients, reason: Reason | None = None
    ) -> None:
        """Record what happened in a step."""
        if gradients.scale is None:  # a subclass has an unscale_ of its own, or a kernel divided
            scale = self._scaling_of(gradients, "step").scale
            gradients.scale, _ = self._operations.inverse(scale)
        outcome = gradients.finish(reason)
        self._outcomes.put(optimizer, outcome)
        self._history.append(outcome)
        for observer in self._observers:
            observer.stepped(optimizer, outcome)

    def _clip(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        shards: Any,
    ) -> Any:
        """Measure the norm, and have the gradients multiplied in ``step``."""
        self._repeating.must_not_loop("clip_grad_norm_")
        gradients = self._iteration.of(optimizer)
        scaling = self._scaling_of(gradients, "clip_grad_norm_")
        gradients.must_allow("clip_grad_norm_")
        parts = self._processes.parts_of(optimizer, shards)
        deciders = self._processes.deciders_of(gradients.optimizer)
        if gradients.clip_coefficient is not None:  # of an earlier call
            gradients.multiply()
        # One reading tells norm and flags; step() then divides and clips in one multiplication.
        norm = None
        if (
            gradients.stage is Stage.SCALED
            and norm_type == 2
            and parts.can_be_measured
            and self._unscaler(optimizer).is_plain
        ):
            norm = gradients.measure(scaling, parts, deciders)
        if norm is None:
            if gradients.is_scaled:
                self.unscale_(optimizer)
                gradients = self._iteration.kept(gradients)
                gradients.move("unscaled to clip")
            norm = gradients.norm(parts, float(norm_type))
        if error_if_nonfinite:
            self._iteration.keep(gradients)  # update() backs off from what was found, all the same
            gradients.must_be_finite(norm, norm_type, deciders)
        gradients.clip(max_norm, norm)
        self._iteration.keep(gradients)
        return norm

    def _clip_at_once(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        shards: Any,
    ) -> Any:
        """Clip where scaling is disabled: ``step`` is not ours then."""
        gradients = Iteration(self._new_gradients).of(optimizer)
        norm = gradients.norm(self._processes.parts_of(optimizer, shards), float(norm_type))
        if error_if_nonfinite:
            gradients.must_be_finite(norm, norm_type, ALONE)
        coefficient = self._operations.clip_coefficient(max_norm, norm)
        self._operations.multiply_gradients_(optimizer, coefficient)
        return norm

    def _repetition(self, max_retries: int) -> Repetition:
        policy = self._policy if self._scale_moves() else None
        state = partial(self._state_in_force, "step")
        return Repetition(self._repeating, self._operations, policy, state, max_retries)

    def _check(self, gradients: Gradients) -> FoundInf:
        """What all that repeat together find in gradients, which stay as they are."""
        deciders = self._processes.repeaters_of(gradients.optimizer)
        state = self._scaling_of(gradients, "attempts").state
        found_inf, _ = deciders.agree(state, self._unscaler(gradients.optimizer).check(), None)
        return found_inf

    def _next_state(self, state: State) -> State:
        """The state after this iteration, by what its checks found; nothing has moved yet."""
        found_infs = self._iteration.found_infs()
        if self._repeating.open_loop is not None:  # it was left early
            overflowed = any(map(self._operations.any_set, found_infs))
            self._repeating.close_loop(keeps_scale=bool(found_infs) and not overflowed)
        state = self._repeating.backed_off or state
        if not found_infs:
            return state
        amaxes = self._iteration.amaxes(self._policy)
        return self._operations.next_state(self._policy, state, found_infs, amaxes)

    def _end_iteration(self) -> None:
        """Forget what is known of the gradients."""
        self._repeating.end_iteration()
        self._iteration = Iteration(self._new_gradients)  # last: until then, update() may repeat

    def _forget_next_state(self) -> None:
        """Drop what an interrupted call would make of a state that is set from outside."""
        self._repeating.backed_off = None
        self._iteration.next_state = None

    def _host_state(self) -> State:
        """The state in host scalars; waits for the device."""
        return self._initial_state if self._state is None else self._operations.read(self._state)

    def _start(self) -> None:
        """Start without steps and without observers."""
        self._new_gradients = partial(self._gradients_type, self._operations)
        self._iteration = Iteration(self._new_gradients)
        self._repeating: Repeating = Repeating()
        self._outcomes = Outcomes()
        self._history: deque[StepOutcome] = deque(maxlen=HISTORY_LENGTH)
        self._observers: list[Observer] = []

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
        if self._iteration:
            raise CallOrderError(
                "a scaler may only be pickled or copied at the beginning of an iteration, or at "
                "the end: call update() first"
            )
        fresh = ("_iteration", "_new_gradients", "_repeating", "_outcomes", "_history")
        left_out = dict.fromkeys(("_state", *fresh, "_observers"))
        return {**self.__dict__, **left_out, "_initial_state": self._host_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerScaler[TensorT, OptimizerT]:
        # A copy decides together with the same processes, and asks the same outside flag.
        for shared in (getattr(self, name, None) for name in ("_group", "_overflow")):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copying.deepcopy(self.__getstate__(), memo))
        return copied


def _mapped(scale: Callable[[Any], Any], outputs: Any) -> Any:
    """The same structure of tensors, each scaled."""
    if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}"
        )
    if hasattr(outputs, "_fields"):
        return type(outputs)(*map(scale, outputs))
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(scale, outputs))
    return map(scale, outputs)


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


def _check_optimizers(optimizers: tuple[Optimizer, ...]) -> None:
    for optimizer in optimizers or (None,):
        if not hasattr(optimizer, "step"):
            raise TypeError(
                "attempts() takes the optimizers whose gradients the loop makes, such as "
                f"attempts(optimizer), got {type(optimizer).__name__}"
            )


def _check_retries(max_retries: object) -> int:
    if isinstance(max_retries, bool) or not isinstance(max_retries, int):
        raise TypeError(f"max_retries must be an integer, got {max_retries!r}")
    if max_retries < 0:
        raise ValueError(f"max_retries must be at least 0, got {max_retries!r}")
    return max_retries
