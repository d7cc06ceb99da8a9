"""The scaler of every eager framework: scale, unscale, step or skip, update."""

from __future__ import annotations

import copy as copying
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, overload

from gradscaler._eager.gradients import Gradients, GradientScale, Unscaler
from gradscaler._eager.iteration import Iteration, Loss, Outcomes
from gradscaler._eager.observed import ObservedScaler
from gradscaler._eager.operations import (
    Args,
    Closure,
    Device,
    FoundInf,
    Kwargs,
    Operations,
    Optimizer,
    ProcessGroup,
    Tensor,
)
from gradscaler._eager.processes import ALONE, Processes
from gradscaler._eager.retries import AttemptLoop, ClosureStep, Retrier, RetryState
from gradscaler._eager.stages import Stage
from gradscaler._eager.stepping import StepCall, Stepping
from gradscaler.errors import CallOrderError
from gradscaler.outcome import HISTORY_LENGTH, Observer, Reason, StepOutcome
from gradscaler.policies import Policy, State

TensorT = TypeVar("TensorT")
OptimizerT = TypeVar("OptimizerT", bound=Any)


class EagerScaler(ABC, Generic[TensorT, OptimizerT]):
    """Loss scaling for one training loop. An adapter adds its framework's names and operations.

    Until ``update`` ends the iteration, each optimizer has a ``Gradients`` object, whose stage says
    what was done with its gradients. Only ``update`` moves the scale. The scale of the latest loss
    is kept, and gradients are divided by it even if ``update`` comes between two optimizers. Each
    optimizer has a found_inf of its own, and an overflow of any optimizer moves the scale.
    """

    def __init__(self, policy: Policy, enabled: bool, max_retries: int) -> None:
        self._policy = policy
        self._enabled = enabled
        self._max_retries = _check_retries(max_retries)
        self._initial_state = policy.init()
        self._state: State | None = None  # on the device of the first scaled tensor, once there
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
                them, nested to any depth.

        Returns:
            The same structure of scaled tensors; for an iterable that is neither a list nor a
            tuple, an iterator. ``outputs`` itself when scaling is disabled.

        Raises:
            ValueError: something in ``outputs`` is not a tensor.
            RuntimeError: a loop over ``attempts`` ran before, and ``step`` was not called since.
        """
        if not self._enabled:
            return outputs
        if not self._operations.is_tensor(outputs):
            return _mapped(self.scale, outputs)
        retry_state = self._retry_state
        if self._iteration:
            made = self._iteration.all_gradients()
            retry_state.must_scale_in_loop(made)
            for gradients in made:
                gradients.note_loss()  # its backward pass may add to them
        # The device is that of the first loss: scalers are made before the model is moved.
        state = self._state or self._place(outputs.device)
        # Before the product, so that an observer sees the loss in the user's own units.
        for observer in self._observers:
            observer.scaled(outputs)
        scaled = self._operations.multiply(outputs, retry_state.state_in_use(state).scale)
        if retry_state.losses is not None:
            retry_state.losses.append((scaled, outputs))
        if retry_state.losses is None or retry_state.in_loop:  # a closure's loss is one optimizer's
            self._iteration.loss = Loss()
            if self._operations.can_watch(scaled):
                self._iteration.add_loss(scaled)
        return scaled

    def unscale_(self, optimizer: OptimizerT) -> None:
        """Divide the optimizer's gradients by the loss scale, in place, and check them.

        Optional: ``step`` unscales gradients that are still scaled. To read or change the unscaled
        gradients before the step, call this once per optimizer and iteration, after the last
        backward pass.

        Raises:
            RuntimeError: this iteration has already called ``unscale_`` or ``step`` for this
                optimizer; the call is in a loop over ``attempts``; or no loss was scaled yet.
            ValueError: a gradient is float16, and float16 gradients were not allowed.
        """
        if not self._enabled:
            return
        self._retry_state.must_not_loop("unscale_")
        gradients = self._iteration.find_or_make(optimizer)
        gradient_scale = self._gradient_scale(gradients, "unscale_")
        gradients.must_allow("unscale_")
        self._check_mixed(gradients)
        if not gradients.is_scaled:  # clip_grad_norm_() has unscaled them
            gradients.move("unscaled")
            return
        self._divide(optimizer, gradients, gradient_scale)
        self._iteration.watch_losses(gradients)

    def step(
        self, optimizer: OptimizerT, *args: Any, max_retries: int | None = None, **kwargs: Any
    ) -> Any:
        """Unscale the gradients if they are still scaled; then step, or skip on overflow.

        A closure (``step(optimizer, closure)``) zeroes the gradients, computes the loss, calls
        ``scaler.scale(loss).backward()``, and returns the loss, scaled or not. Each evaluation is
        unscaled and checked before the optimizer sees it, and the optimizer gets the
        unscaled loss. An evaluation that overflows is repeated at a backed-off scale, up to
        ``max_retries`` times; then the step is skipped, and parameters and optimizer state are
        put back. A copy of both is held during such a step. The closure must compute gradients of
        this optimizer alone, because those of another optimizer may need another scale.

        Args:
            optimizer: the optimizer that owns the gradients.
            args: positional arguments for ``optimizer.step``.
            max_retries: the largest number of repetitions of one evaluation. The scaler's own
                setting if None.
            kwargs: keyword arguments for ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns, or None if the step was skipped.

        Raises:
            RuntimeError: this iteration has already called ``step`` for this optimizer; the call
                is in a closure or in a loop over ``attempts``; no loss was scaled yet; or the
                last call was interrupted.
            ValueError: a gradient is float16, and float16 gradients were not allowed.
        """
        if not self._enabled:
            # max_retries is left out: a disabled scaler repeats nothing.
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
        """Move the scale by the policy, given the found_inf of this iteration's optimizers.

        An overflow of any optimizer counts as a non-finite step of the policy. If no optimizer had
        gradients, the iteration does not count as a step, and nothing moves. Call this once per
        iteration, after the last ``step``.

        Args:
            new_scale: a number, or a tensor of one element; the scale is set to it instead.

        Raises:
            RuntimeError: no gradients were checked since the last call; or the optimizer itself was
                stepped after ``clip_grad_norm_``.
            ValueError, TypeError: ``new_scale`` cannot be a loss scale; nothing changes.
        """
        if not self._enabled:
            return
        self._retry_state.must_not_run("update")
        state = self._state_in_force("update")
        self._iteration.must_be_applied_by_scaler()
        for observer in self._observers:
            observer.updating()
        # A scale that the user sets wins over the policy, and counts no step, as in torch.
        if new_scale is not None:
            self._keep_scale_of_loss(state)
            self._set_scale(new_scale)
        else:
            # Kept, so that an update that is interrupted and called again moves to the same state.
            if self._iteration.next_state is None:
                self._iteration.next_state = self._next_state(state)
            if self._iteration.next_state.scale is not state.scale:
                self._keep_scale_of_loss(state)
            self._state = self._operations.move(state, self._iteration.next_state)
        self._end_iteration()
        for observer in self._observers:
            observer.updated()

    def minimize(self, optimizer: OptimizerT, scaled_loss: TensorT | None = None) -> Any:
        """``step(optimizer)`` and ``update()`` in one call, after the backward pass.

        Args:
            optimizer: the optimizer that owns the gradients.
            scaled_loss: unused; calls written for Paddle's scaler pass it.

        Returns:
            What ``step`` returns.
        """
        result = self.step(optimizer)
        self.update()
        return result

    # Calls that the frameworks' own scalers lack.

    def attempts(
        self,
        *optimizers: OptimizerT,
        max_retries: int | None = None,
        buffers: Iterable[TensorT] = (),
    ) -> Iterator[int]:
        """Repeat forward and backward at lower scales until the gradients are finite.

        ::

            for micro_batch in batch:
                for _ in scaler.attempts(optimizer):
                    loss = loss_of(model, micro_batch) / len(batch)
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        The gradients are checked after each run of the loop's body. If they overflowed, the
        gradients from before the body are put back, the scale backs off, and the body runs again
        on the same batch. So each micro-batch counts once. Gradients that were accumulated before
        the loop are kept: they are multiplied by the ratio of the new scale to the old one, which
        is exact for powers of two, and ``step`` divides by the new scale. A repetition draws the
        same random numbers from the framework's own generators.

        When retries are used up, the gradients stay non-finite, and ``step`` skips. ``break`` or
        an exception ends the loop and leaves the gradients as they are; ``step`` still checks them.
        With scaling disabled the body runs once.

        Zero the gradients before the loop, not in it, and clip after it. Each attempt waits for the
        device. If there were gradients before the loop, it holds a copy of them until it ends.

        Args:
            optimizers: every optimizer whose parameters get gradients from the losses of the body.
            max_retries: the largest number of repetitions. The scaler's own setting if None.
            buffers: further tensors that a repetition puts back, such as ``model.buffers()``, where
                batch normalization keeps its statistics.

        Returns:
            An iterator of the number of each attempt, from 0.

        Raises:
            RuntimeError: this iteration has already called ``unscale_``, ``clip_grad_norm_`` or
                ``step``; the call is in a closure or in another such loop; or the body scaled no
                loss.
            ValueError: there are other processes, and it is unknown which repeat together.
            TypeError: an argument is not an optimizer, ``max_retries`` is not an integer, or
                ``buffers`` holds something that is not a tensor.
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
        self._retry_state.must_not_run("attempts")
        gradients_of = self._iteration.for_next_loss
        made = {id(each.optimizer): each for each in map(gradients_of, optimizers)}
        for gradients in made.values():
            gradients.must_allow("attempts")
            self._processes.repeaters_of(gradients.optimizer)  # may raise, before anything changes
        for gradients in made.values():
            gradients.is_attempted = True
        self._iteration |= made
        retrier = self._retrier(retries)
        return AttemptLoop(list(made.values()), kept, retrier, self._check).run()

    def clip_grad_norm_(
        self,
        optimizer: OptimizerT,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        shards: ProcessGroup | None = None,
    ) -> TensorT:
        """Clip the unscaled gradients of an optimizer by their total norm.

        ``step`` multiplies the gradients by ``min(1, max_norm / (norm + 1e-6))``, unless it skips.
        For a 2-norm, one pass over the gradients measures the norm and finds overflow, and
        ``step`` unscales and clips in one multiplication. For other norms, this call unscales the
        gradients. Until ``step`` the gradients are not clipped: a second call clips further, but
        the framework's own clipping would see unclipped gradients. To read or change unscaled
        gradients, call ``unscale_`` first. The gradients of a skipped step are not clipped, and
        may still be scaled. If ``step`` takes a closure, call this in the closure. The step may be
        left out, such as for too large a norm; call ``update`` all the same.

        Args:
            optimizer: the optimizer that owns the gradients.
            max_norm: the largest norm of the clipped gradients, >= 0; inf only measures.
            norm_type: the p of the p-norm; inf for the largest magnitude.
            error_if_nonfinite: whether to raise if the norm is NaN or Inf. All processes that
                decide together raise, which takes one more all-reduce.
            shards: the process group whose processes hold the other parts of the model; their
                norms are part of the total. Only in PyTorch and Paddle.

        Returns:
            The total norm of the unscaled gradients, a scalar tensor.

        Raises:
            RuntimeError: ``step`` was called before in this iteration; no loss was scaled yet; or
                the norm is not finite and ``error_if_nonfinite`` is True.
            ValueError: ``max_norm`` is negative or NaN; or a gradient is float16, and float16
                gradients were not allowed.
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
        """The outcome of the optimizer's latest step through this scaler.

        Raises:
            RuntimeError: the optimizer has not stepped through this scaler.
        """
        outcome = self._outcomes.get(optimizer)
        if outcome is None:
            raise CallOrderError(
                "last_step() has nothing to report for this optimizer: call step(optimizer) first"
            )
        return outcome

    @property
    def history(self) -> tuple[StepOutcome, ...]:
        """The outcomes of the latest 1,000 steps of all optimizers, the latest last.

        Reading a flag of an outcome may wait for the device; this property does not.
        """
        return tuple(self._history)

    # For observers and diagnosis; a training loop does not need these.

    def add_observer(self, observer: Observer) -> None:
        """Tell an observer of each call from now on. A copy of the scaler has no observers."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Tell an observer of no more calls. Does nothing if it was not added."""
        if observer in self._observers:
            self._observers.remove(observer)

    @property
    def observed(self) -> ObservedScaler[TensorT, OptimizerT]:
        """The scaler's interface for observers."""
        return ObservedScaler(self)

    # An adapter supplies these. It may also override pickling, and any public method whose
    # signature or rules differ in its framework.

    _operations: ClassVar[Operations]
    _gradients_type: ClassVar[type[Gradients]] = Gradients
    _processes: Processes = ALONE

    _iteration: Iteration
    _allows_mixed: bool = False  # as the frameworks' own scalers do
    _shown: Tensor | None = None  # the scale that users' code sees, if it is not the one in use

    @abstractmethod
    def _unscaler(self, optimizer: Optimizer) -> Unscaler:
        """The optimizer's unscaler, which calls any method that the user has replaced."""

    @abstractmethod
    def _set_scale(self, new_scale: float | TensorT) -> None:
        """Set the scale by hand."""

    def _stepping_of(self, optimizer: Optimizer) -> Stepping | None:
        """The way to step the optimizer, which calls any method that the user has replaced.

        None for the plain way: its ``step``, if its gradients are finite.
        """
        return None

    def _scale_moves(self) -> bool:
        """Whether ``update`` asks the policy for the next scale."""
        return True

    def _place(self, device: Device) -> State:
        """Put the state on the device of the first scaled tensor."""
        self._state = self._operations.place(self._initial_state, device)
        return self._state

    def _place_before_loss(self, optimizer: Optimizer) -> None:
        """Place the state without a call of ``scale``, if another process may have made it."""

    # Parts that public calls share.

    def _check_mixed(self, gradients: Gradients) -> None:
        """Refuse gradients of which a part is scaled, unless the scaler stands in for another."""
        if not self._allows_mixed:
            gradients.must_not_be_mixed()

    def _state_in_force(self, call: str) -> State:
        """The scaler's state; CallOrderError, naming ``call``, if no loss was scaled yet."""
        if self._state is None:
            raise CallOrderError(
                f"{call}() was called before any loss was scaled: call "
                "scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._state

    def _gradient_scale(self, gradients: Gradients, call: str) -> GradientScale:
        """The scale of gradients. In a closure or a loop it may be backed off."""
        # Two states: the gradients' own may be older, or backed off by a loop. The scaler's is the
        # same in all processes, and they decide by it.
        state = self._state
        if state is None:
            self._place_before_loss(gradients.optimizer)
            state = self._state_in_force(call)
        scale = (gradients.attempt_state or state).scale
        loss = self._iteration.loss
        if self._retry_state.losses is not None:
            if self._retry_state.backed_off is not None:
                state = self._retry_state.backed_off
                scale = state.scale
        elif loss is not None and loss.scale is not None and gradients.attempt_state is None:
            scale = loss.scale_for(gradients.optimizer, state.scale)
        return GradientScale(scale, state, getattr(self._policy, "amax_interval", 0))

    def _take_step(
        self,
        optimizer: Optimizer,
        stepping: Stepping | None,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Step without a closure, or skip, and record what happened."""
        if self._retry_state.losses is not None:
            self._retry_state.must_not_run("step")
        gradients = self._iteration.find_or_make(optimizer)
        gradients.must_allow("step")
        if gradients.is_mixed:  # read in place: a plain step makes no call for it
            self._check_mixed(gradients)
        gradient_scale = self._gradient_scale(gradients, "step")
        for observer in self._observers:
            observer.stepping(optimizer, gradient_scale.scale if gradients.is_scaled else None)
        try:
            if gradients.is_scaled and (stepping is None or not stepping.takes_scaled):
                gradients = self._unscaled(optimizer, gradients, gradient_scale)
            if stepping is None:
                result = gradients.apply_if_finite(optimizer.step, args, kwargs)
            else:
                call = StepCall(optimizer, gradients, gradient_scale, args, kwargs)
                result = stepping.step(call)
            # A fused step has checked gradients that are not in the iteration yet, and a user's
            # method may have put others there.
            self._conclude(optimizer, self._iteration.find_or_record(gradients))
        except BaseException as error:
            self._iteration.note_raised(optimizer, error)
            raise
        return result

    def _unscaled(
        self, optimizer: Optimizer, gradients: Gradients, gradient_scale: GradientScale
    ) -> Gradients:
        """Unscale gradients for a step, by ``unscale_`` if a subclass replaces it; return them."""
        if gradients.stage is Stage.MEASURED:
            gradients.overflowed = gradients.have_overflowed
        # Gradients that overflowed are divided, too: a skip leaves the same values as unscale_().
        if gradients.overflowed is False:
            gradients.multiply()
        elif getattr(self.unscale_, "__func__", None) is EagerScaler.unscale_:
            # A shortcut: step() has made every check that unscale_() makes.
            self._divide(gradients.optimizer, gradients, gradient_scale)
        else:
            self._call_unscale(gradients.optimizer, gradient_scale)
            return self._iteration.find_or_record(gradients)
        return gradients

    def _call_unscale(self, optimizer: Optimizer, gradient_scale: GradientScale) -> None:
        """Call ``unscale_``. If a subclass replaces it, it may read the scale."""
        if gradient_scale.scale is gradient_scale.state.scale:
            self.unscale_(optimizer)
        else:
            with self._showing(gradient_scale.scale):
                self.unscale_(optimizer)

    def _divide(
        self, optimizer: Optimizer, gradients: Gradients, gradient_scale: GradientScale
    ) -> None:
        """Divide gradients by the scale, and check them."""
        deciders = self._processes.deciders_of(gradients.optimizer)  # may raise: before changes
        if self._retry_state.losses is None:  # else a closure, which may be called again
            for observer in self._observers:
                observer.unscaling(optimizer, gradient_scale.scale)
        is_new = self._iteration.get(id(gradients.optimizer)) is not gradients
        self._iteration.record(gradients)  # before they change, so that an interrupt is remembered
        try:
            gradients.unscale(gradient_scale, self._unscaler(optimizer), deciders)
        except BaseException:
            if is_new and gradients.is_scaled:  # they were refused, and nothing has changed
                self._iteration.drop(gradients)
            raise

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        closure: Closure,
        max_retries: int,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        self._retry_state.must_not_run("step")
        gradients = self._iteration.for_next_loss(optimizer)
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
            self._retrier(max_retries),
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
        """Record the outcome of a step."""
        if gradients.scale is None:  # a subclass's own unscale_, or a kernel, has divided them
            scale = self._gradient_scale(gradients, "step").scale
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
        shards: ProcessGroup | None,
    ) -> Tensor:
        """Measure the norm, and let ``step`` multiply the gradients."""
        self._retry_state.must_not_loop("clip_grad_norm_")
        gradients = self._iteration.find_or_make(optimizer)
        gradient_scale = self._gradient_scale(gradients, "clip_grad_norm_")
        gradients.must_allow("clip_grad_norm_")
        self._check_mixed(gradients)
        parts = self._processes.parts_of(optimizer, shards)
        deciders = self._processes.deciders_of(gradients.optimizer)
        if gradients.clip_coefficient is not None:  # from an earlier call
            gradients.multiply()
        # One pass gives norm and flags; step() then divides and clips in one multiplication.
        norm = None
        if (
            gradients.stage is Stage.SCALED
            and norm_type == 2
            and parts.can_be_measured
            and self._unscaler(optimizer).is_plain
        ):
            norm = gradients.measure(gradient_scale, parts, deciders)
        if norm is None:
            if gradients.is_scaled:
                self._call_unscale(optimizer, gradient_scale)
                gradients = self._iteration.find_or_record(gradients)
                gradients.move("unscaled to clip")
            norm = gradients.norm(parts, float(norm_type))
        if error_if_nonfinite:
            self._iteration.record(gradients)  # so that update() backs off even if this raises
            gradients.must_be_finite(norm, norm_type, deciders)
        gradients.clip(max_norm, norm)
        self._iteration.record(gradients)
        self._iteration.watch_losses(gradients)
        self._watch_for_steps(gradients)
        return norm

    def _watch_for_steps(self, gradients: Gradients) -> None:
        """Watch for a step of the user's in place of the scaler's, which would ignore the clipping.

        A close watch takes more copies, so it ends once the scaler has taken the latest step.
        """
        optimizer = gradients.optimizer
        is_ours = self._outcomes.get(optimizer) and id(optimizer) not in self._iteration.left_out
        if gradients.await_clipping and gradients.is_untouched is None:
            gradients.is_untouched = self._operations.watch_steps(optimizer, not is_ours)

    def _clip_at_once(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        shards: ProcessGroup | None,
    ) -> Tensor:
        """Clip immediately, for a disabled scaler: its ``step`` only calls the optimizer's."""
        # An iteration of its own: a disabled scaler has no update() that would end one.
        gradients = Iteration(self._new_gradients).find_or_make(optimizer)
        norm = gradients.norm(self._processes.parts_of(optimizer, shards), float(norm_type))
        if error_if_nonfinite:
            gradients.must_be_finite(norm, norm_type, ALONE)
        coefficient = self._operations.clip_coefficient(max_norm, norm)
        self._operations.multiply_gradients_(optimizer, coefficient)
        return norm

    def _retrier(self, max_retries: int) -> Retrier:
        policy = self._policy if self._scale_moves() else None
        state = partial(self._state_in_force, "step")
        return Retrier(self._retry_state, self._operations, policy, state, max_retries)

    def _check(self, gradients: Gradients) -> FoundInf:
        """The found_inf of gradients over all processes that repeat together; changes nothing."""
        deciders = self._processes.repeaters_of(gradients.optimizer)
        state = self._gradient_scale(gradients, "attempts").state
        found_inf, _ = deciders.agree(state, self._unscaler(gradients.optimizer).check(), None)
        return found_inf

    def _next_state(self, state: State) -> State:
        """The state that this iteration's checks lead to; the scaler's own does not move."""
        found_infs = self._iteration.found_infs()
        if self._retry_state.before_loop is not None:  # it was left early
            overflowed = any(map(self._operations.any_set, found_infs))
            self._retry_state.close_loop(keeps_scale=bool(found_infs) and not overflowed)
        state = self._retry_state.backed_off or state
        return self._moved(state, found_infs, self._iteration.amaxes(self._policy))

    def _moved(self, state: State, found_infs: list[FoundInf], amaxes: list[Tensor]) -> State:
        """The state after ``state`` and these checks; the same one if nothing was checked."""
        if not found_infs:
            return state
        return self._operations.next_state(self._policy, state, found_infs, amaxes)

    def _end_iteration(self) -> None:
        """Forget this iteration's gradients."""
        self._retry_state.end_iteration()
        # Last, so that an interrupted update() can be called again.
        self._iteration = self._iteration.following()

    def _keep_scale_of_loss(self, state: State) -> None:
        """Keep the latest loss's scale, that of ``state``, which is about to move."""
        loss = self._iteration.loss
        if loss is not None and loss.scale is None:
            loss.scale = self._operations.copy_scale(state.scale)

    def _forget_next_state(self) -> None:
        """Forget what an interrupted call has decided, because the state is set from outside."""
        self._retry_state.backed_off = None
        self._iteration.next_state = None

    def _host_state(self) -> State:
        """The state in host scalars; waits for the device."""
        return self._initial_state if self._state is None else self._operations.read(self._state)

    def _scale_in_use(self) -> Tensor:
        """The scale that users' code sees: that of the body that runs, which may have backed off.

        Users' methods that unscale or step see the scale of the gradients.
        """
        if self._shown is not None:
            return self._shown
        return self._retry_state.state_in_use(self._state or self._initial_state).scale

    @contextmanager
    def _showing(self, scale: Tensor) -> Iterator[None]:
        """A context in which users' code sees this scale."""
        try:
            self._shown = scale
            yield
        finally:
            self._shown = None

    def _start(self) -> None:
        """Start without steps and without observers."""
        self._new_gradients = partial(self._gradients_type, self._operations)
        self._iteration = Iteration(self._new_gradients)
        self._retry_state: RetryState = RetryState()
        self._outcomes = Outcomes()
        self._history: deque[StepOutcome] = deque(maxlen=HISTORY_LENGTH)
        self._observers: list[Observer] = []

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._enabled:
            return f"<{name} disabled>"  # without parentheses, like torch's: trainers match it
        state = self._host_state()
        return (
            f"{name}(scale={float(state.scale)!r}, finite_steps={int(state.finite_steps)}, "
            f"nonfinite_steps={int(state.nonfinite_steps)}, policy={self._policy!r})"
        )

    # Pickling and copying.

    def __getstate__(self) -> dict[str, object]:
        if self._iteration:
            raise CallOrderError(
                "a scaler may only be pickled or copied at the beginning of an iteration, or at "
                "the end: call update() first"
            )
        # Weak references and functions of this process cannot be pickled; a copy starts without.
        fresh = ("_iteration", "_new_gradients", "_retry_state", "_outcomes", "_history")
        left_out = dict.fromkeys(("_state", *fresh, "_observers"))
        return {**self.__dict__, **left_out, "_initial_state": self._host_state()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()

    def __deepcopy__(self, memo: dict[int, object]) -> EagerScaler[TensorT, OptimizerT]:
        # A copy decides together with the same processes, and asks the same outside flag.
        for shared in (getattr(self, name, None) for name in ("_group", "_overflow")):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copying.deepcopy(self.__getstate__(), memo))
        return copied


def _mapped(scale: Callable[[Any], object], outputs: object) -> Any:
    """Scale each tensor in a structure; return the same structure."""
    if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}"
        )
    if hasattr(outputs, "_fields"):
        return type(outputs)(*map(scale, outputs))
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(scale, outputs))
    return map(scale, outputs)


def _take_closure(args: Args, kwargs: Kwargs) -> tuple[Closure | None, Args, Kwargs]:
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
