"""The gradients of all optimizers in one iteration, and what outlives it: loss and outcomes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

from gradscaler._eager.gradients import Gradients
from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._eager.stages import Stage
from gradscaler.errors import CallOrderError
from gradscaler.outcome import StepOutcome
from gradscaler.policies import Policy, State


class Iteration(defaultdict[int, Any]):
    """The gradients of each optimizer since the last ``update``, by the optimizer's id.

    A wrapper's id finds the gradients of the optimizer that it wraps. Frameworks expose this dict,
    and may put dicts of their own into it.

    Attributes:
        next_state: the state that ``update`` has decided to move to, else None.
        loss: the latest loss, of this iteration or an earlier one; None if there was none.
        scaled: a weak reference to each scaled loss of this iteration that was alive when the
            latest one was scaled.
        left_out: the ids of the optimizers whose step the iteration before left out after clipping.
    """

    next_state: State | None = None
    loss: Loss | None = None
    scaled: tuple[Callable[[], Tensor | None], ...] = ()
    left_out: frozenset[int] = frozenset()
    _owners: dict[int, tuple[Optimizer, Optimizer]] | None = None  # with wrappers, by their ids

    def following(self) -> Iteration:
        """The next iteration. Gradients that were checked, and not stepped, await their step."""
        following = Iteration(self.default_factory)
        loss = following.loss = self.loss
        for key, each in self.items():
            if not isinstance(each, Gradients):  # a framework has put it here
                continue
            each.is_counted = each.found_inf is not None
            if not each.is_over:
                following._await_step(key, each)
            elif loss is not None:
                loss.note_step(key, each.optimizer)
        return following

    def _await_step(self, key: int, gradients: Gradients) -> None:
        """Note gradients of the iteration before whose step was left out, or is still to come."""
        if gradients.await_clipping:
            self.left_out |= {key}
        if self.loss is not None and gradients.awaits_step:
            self.loss.waiting = {**self.loss.waiting, key: gradients}

    def find_or_make(self, optimizer: Optimizer) -> Gradients:
        """The optimizer's gradients, or a new object that is not in the dict yet.

        Raises:
            TypeError: ``optimizer`` is not an optimizer.
        """
        owner = owner_of(optimizer)
        if owner is not optimizer:
            self._wrap(optimizer, owner)
        found: Gradients | None = self.get(id(owner))
        if found is None and self.loss is not None:
            found = self.loss.waiting.get(id(owner))
        # After an interrupt a user clears the gradients; all-new ones may be used without update().
        if found is None or found.are_replaced:
            if not hasattr(owner, "step"):
                raise TypeError(
                    "a scaler takes the optimizer that owns the gradients, as in "
                    "scaler.clip_grad_norm_(optimizer, max_norm), scaler.unscale_(optimizer) and "
                    f"scaler.step(optimizer), got {type(optimizer).__name__}"
                )
            assert self.default_factory is not None
            found = self.default_factory()
        found.optimizer = owner  # a framework may have made the entry, given only the id
        return found

    def for_next_loss(self, optimizer: Optimizer) -> Gradients:
        """Like ``find_or_make``, but for a loss that is still to come.

        So gradients that were checked before the latest ``update`` don't count.
        """
        found = self.find_or_make(optimizer)
        if found.stage is Stage.SCALED or id(found.optimizer) in self:
            return found
        assert self.default_factory is not None
        new: Gradients = self.default_factory()
        new.optimizer = found.optimizer
        return new

    def record(self, gradients: Gradients) -> None:
        """Put these gradients into the dict, until the iteration ends."""
        self[id(gradients.optimizer)] = gradients

    def add_loss(self, scaled: Tensor) -> None:
        """Add a scaled loss, whose backward pass must not add to gradients that are unscaled."""
        for gradients in self.all_gradients() if self else ():
            if gradients.is_known:
                gradients.watch(scaled)
        self.scaled = (*(each for each in self.scaled if each() is not None), ref(scaled))

    def watch_losses(self, gradients: Gradients) -> None:
        """Watch the losses whose backward pass may still come, once gradients are unscaled."""
        for alive in self.scaled:
            scaled = alive()
            if scaled is not None:
                gradients.watch(scaled)

    def drop(self, gradients: Gradients) -> None:
        """Remove these gradients from the dict."""
        self.pop(id(gradients.optimizer), None)

    def renew(self, key: int) -> None:
        """Forget the gradients of the optimizer with this id, because it gets new ones."""
        self.pop(key, None)
        if self.loss is not None:
            self.loss.forget(key)

    def find_or_record(self, gradients: Gradients) -> Gradients:
        """Record these gradients, or return those that a user's method has already recorded."""
        found: Gradients = self.setdefault(id(gradients.optimizer), gradients)
        found.optimizer = gradients.optimizer  # they may have been made, given only the id
        return found

    def all_gradients(self) -> list[Gradients]:
        """All gradients in the dict, without the entries that a framework has put there."""
        return [each for each in self.values() if isinstance(each, Gradients)]

    def found_infs(self) -> list[FoundInf]:
        """The flags of all gradients that were checked.

        Raises:
            CallOrderError: none were checked.
        """
        # Gradients that were checked before the last update, and still wait, were counted there.
        found, were_checked = [], self.loss is not None and bool(self.loss.waiting)
        for each in self.values():
            if not isinstance(each, Gradients):  # a framework has put it here
                continue
            if each.found_inf and not each.is_counted:
                found.append(each.found_inf)
            elif each.found_inf is not None or each.stage is Stage.UNKNOWN:
                were_checked = True  # the optimizer had none, or their state is unknown
        if not found and not were_checked:
            raise CallOrderError(
                "No inf checks were recorded prior to update(): call step(optimizer) or "
                "unscale_(optimizer) before update()"
            )
        return found

    def amaxes(self, policy: Policy) -> list[Tensor]:
        """Each optimizer's largest gradient; empty if the policy does not need them."""
        if not getattr(policy, "amax_interval", 0):
            return []
        uncounted = (each for each in self.all_gradients() if not each.is_counted)
        return [each.amax for each in uncounted if each.amax is not None]

    def note_raised(self, optimizer: Optimizer, error: BaseException) -> None:
        """Note that a call for an optimizer raised."""
        gradients = self.get(id(owner_of(optimizer)))
        if gradients is not None:
            gradients.note_raised(error)

    def uncounted(self) -> set[int]:
        """The ids of the optimizers that no ``update`` has counted yet."""
        return {key for key, each in self.items() if not getattr(each, "is_counted", False)}

    def must_be_applied_by_scaler(self) -> None:
        """Raise CallOrderError if the user has stepped an optimizer whose step was to clip."""
        for each in self.values():
            if isinstance(each, Gradients) and each.were_applied_elsewhere:
                raise CallOrderError(
                    "parameters have changed between clip_grad_norm_() and update(), without "
                    "scaler.step(optimizer): if optimizer.step() changed them, call "
                    "scaler.step(optimizer) in its place, which unscales and clips the gradients; "
                    "to leave out a step, change no parameters before update()"
                )

    def _wrap(self, wrapper: Optimizer, owner: Optimizer) -> None:
        """Let a wrapper share its optimizer's gradients, including ones looked up earlier."""
        made = self.pop(id(wrapper), None)
        if made is not None:
            self.setdefault(id(owner), made)
        self._owners = self._owners or {}
        # Both are kept alive, so that no other object gets their ids.
        self._owners[id(wrapper)] = owner, wrapper

    def __missing__(self, key: int) -> Gradients:
        found: Gradients
        if self._owners is not None and key in self._owners:
            found = self[id(self._owners[key][0])]
        elif self.loss is not None and key in self.loss.waiting:
            found = self.setdefault(key, self.loss.waiting[key])
        else:
            found = super().__missing__(key)
        return found


class Loss:
    """The latest loss that was scaled outside of a closure.

    Training loops may call ``update`` between two optimizers after one loss, as Lightning's manual
    optimization does. So this is kept from iteration to iteration, until another loss is scaled.

    Attributes:
        scale: the scale that it was multiplied by, once that of the scaler may be another.
        waiting: the gradients that await their step since an earlier iteration, by the ids of
            their optimizers.
    """

    # Defaults stand on the class: each call of scale() makes a new object.
    scale: Tensor | None = None
    waiting: Mapping[int, Gradients] = {}
    _stepped: Mapping[int, Callable[[], Optimizer | None]] = {}

    def scale_for(self, optimizer: Optimizer, in_force: Tensor) -> Tensor:
        """The scale of an optimizer's gradients; ``in_force`` is the scaler's.

        An optimizer that steps again without another loss has gradients that the user has made,
        with the scale in force.
        """
        stepped = self._stepped.get(id(optimizer), lambda: None)
        return in_force if self.scale is None or stepped() is optimizer else self.scale

    def forget(self, key: int) -> None:
        """Forget gradients that wait, because the optimizer with this id gets new ones."""
        if key in self.waiting:
            self.waiting = {other: each for other, each in self.waiting.items() if other != key}

    def note_step(self, key: int, optimizer: Optimizer) -> None:
        """Note that the optimizer with this id has no gradients of this loss any more."""
        self._stepped = {**self._stepped, key: reference(optimizer)}
        if self.waiting:
            self.forget(key)


class Outcomes:
    """The latest outcome of each optimizer that is still alive, whether hashable or not."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Callable[[], Optimizer | None], StepOutcome]] = {}

    def put(self, optimizer: Optimizer, outcome: StepOutcome) -> None:
        """Keep an outcome as long as the owner of the optimizer's parameters lives."""
        optimizer = owner_of(optimizer)
        key = id(optimizer)
        kept = self._by_id.get(key)
        alive = kept[0] if kept and kept[0]() is optimizer else self._reference(optimizer)
        self._by_id[key] = alive, outcome

    def get(self, optimizer: Optimizer) -> StepOutcome | None:
        """The optimizer's outcome, if there is one."""
        optimizer = owner_of(optimizer)
        alive, outcome = self._by_id.get(id(optimizer), (lambda: None, None))
        return outcome if alive() is optimizer else None

    def all(self) -> list[tuple[Optimizer, StepOutcome]]:
        """Each optimizer that is still alive, with its outcome."""
        kept = [(alive(), outcome) for alive, outcome in dict(self._by_id).values()]
        return [(optimizer, outcome) for optimizer, outcome in kept if optimizer is not None]

    def _reference(self, optimizer: Optimizer) -> Callable[[], Optimizer | None]:
        key, outcomes = id(optimizer), self._by_id  # not self: no optimizer keeps a scaler alive
        return reference(optimizer, lambda _: outcomes.pop(key, None))


def owner_of(optimizer: Optimizer) -> Optimizer:
    """The innermost optimizer with these ``param_groups``.

    Trainers wrap optimizers, and step the wrapper or the optimizer. A wrapper has the optimizer in
    its attribute ``optimizer``, and the same list of groups.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return optimizer
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if (
            inner is None
            or inner is optimizer
            or getattr(inner, "param_groups", None) is not groups
        ):
            return optimizer
        optimizer = inner


def reference(
    optimizer: Optimizer, when_gone: Callable[[Any], object] | None = None
) -> Callable[[], Optimizer | None]:
    """A weak reference to an optimizer, or a strong one if its class has none."""
    try:
        return ref(optimizer, when_gone)
    except TypeError:  # its class has __slots__ without __weakref__
        return lambda: optimizer
