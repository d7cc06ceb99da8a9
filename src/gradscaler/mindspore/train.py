"""``mindspore.nn``'s train step with loss scaling, and functions that build one."""

from __future__ import annotations

import warnings
from typing import Any

import mindspore
from mindspore import Tensor, amp, nn, ops

from gradscaler.errors import levels_to_caller
from gradscaler.mindspore._operations import every_finite, largest, on_cpu, unscale_all
from gradscaler.mindspore.managers import DynamicLossScaleManager
from gradscaler.policies import _checks, amax_interval

_native_build = amp.build_train_network  # kept, because a user may replace it by ours


class TrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):  # type: ignore[misc] # untyped base
    """A train step with loss scaling: a drop-in for ``mindspore.nn.TrainOneStepWithLossScaleCell``.

    Called with the network's inputs it returns three Tensors: the loss; whether a gradient
    overflowed, a bool of shape (); and the float32 loss scale, of shape () or (1,). In PyNative
    mode the loss scale is the Parameter itself, which the next step changes. A step that overflowed
    leaves the parameters and the optimizer as they were. MindSpore's own class needs an Ascend or a
    GPU.

    Args:
        network: a cell that returns the loss.
        optimizer: the optimizer of the network's parameters.
        scale_sense: an update cell, which moves the scale after each step; or the scale, a Tensor
            of shape () or (1,), which :meth:`set_sense_scale` sets.

    Warns:
        UserWarning: the optimizer has a ``loss_scale`` of its own, by which it would divide again.

    Raises:
        TypeError: ``scale_sense`` is neither an update cell nor a Tensor.
        ValueError: ``scale_sense`` is a Tensor of another shape, or not positive and finite.

    >>> from gradscaler.mindspore import DynamicLossScaleUpdateCell
    >>> layer = nn.Dense(2, 1, weight_init="ones", has_bias=False)
    >>> network = nn.WithLossCell(layer, nn.MSELoss())
    >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    >>> step = TrainOneStepWithLossScaleCell(network, optimizer, DynamicLossScaleUpdateCell())
    >>> loss, overflow, scale = step(Tensor([[1.0, 2.0]]), Tensor([[4.0]]))
    >>> print(loss, overflow, scale.asnumpy())
    1.0 False 16777216.0
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, scale_sense: nn.Cell | Tensor) -> None:
        if isinstance(scale_sense, Tensor):
            scale_sense = _as_scale("scale_sense", scale_sense, scale_sense.shape)
        elif isinstance(scale_sense, amp.LossScaleManager):
            raise TypeError(
                "scale_sense must be an update cell or a Tensor: pass the result of "
                f"get_update_cell() of this {type(scale_sense).__name__}"
            )
        elif isinstance(scale_sense, nn.Cell) and not hasattr(scale_sense, "get_loss_scale"):
            raise TypeError(
                "scale_sense must be an update cell or a Tensor, got a "
                f"{type(scale_sense).__name__}, which has no get_loss_scale()"
            )
        super().__init__(network, optimizer, scale_sense)
        _warn_of_other_scale(optimizer, 1.0)
        self._wants_amax = amax_interval(scale_sense) > 0
        if self._wants_amax and self.is_distributed:
            self._all_gather = ops.AllGather()  # on the CPU, AllReduce has no maximum

    def construct(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, whether a gradient overflowed, and the loss scale."""
        loss = self.network(*inputs)
        scale = self.scale_sense
        status = Tensor([0] * 8, mindspore.int32)  # only Ascend's float status uses it
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.grad_reducer(unscale_all(scale, *grads))
        overflow = self.get_overflow_status(status, grads)
        amax = self.get_amax(grads) if self._wants_amax else None
        if not self.process_loss_scale(overflow, amax):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss, overflow, scale

    def get_overflow_status(self, status: Tensor, compute_output: tuple[Tensor, ...]) -> Tensor:
        """Whether a gradient overflowed on any device: a bool Tensor of shape ().

        Args:
            status: the result of ``start_overflow_check``; unused on the CPU.
            compute_output: the gradients, a tuple.
        """
        if not on_cpu():
            return super().get_overflow_status(status, compute_output)
        overflow = ops.logical_not(every_finite(*compute_output))
        if self.is_distributed:
            overflow = self.allreduce(overflow.astype(mindspore.float32)) > 0
        return overflow

    def get_amax(self, compute_output: tuple[Tensor, ...]) -> Tensor:
        """The largest magnitude of a gradient on any device: a float32 Tensor of shape ().

        Args:
            compute_output: the unscaled gradients, a tuple.
        """
        found = largest(*compute_output)
        return self._all_gather(found.reshape((1,))).max() if self.is_distributed else found

    def process_loss_scale(self, overflow: Tensor, amax: Tensor | None = None) -> Tensor:
        """Move the loss scale by the update cell, if there is one, and return ``overflow``.

        Args:
            overflow: whether a gradient overflowed, from :meth:`get_overflow_status`.
            amax: the largest gradient, from :meth:`get_amax`, for a policy that needs it.
        """
        if self._wants_amax:
            return self.loss_scaling_manager(self.scale_sense, overflow, amax)
        if self.loss_scaling_manager is not None:  # not super(), which fails to compile here
            return self.loss_scaling_manager(self.scale_sense, overflow)
        return overflow

    def set_sense_scale(self, sens: Tensor) -> None:
        """Set the loss scale.

        Args:
            sens: a Tensor of one element, positive and finite.

        Raises:
            TypeError: ``sens`` is not a Tensor.
            ValueError: ``sens`` has more than one element, or is not positive and finite; nothing
                changes.
        """
        if not isinstance(sens, Tensor):
            raise TypeError(f"sens must be a Tensor, got {sens!r} ({type(sens).__name__})")
        self.scale_sense.set_data(_as_scale("sens", sens, self.scale_sense.shape))


def _as_scale(name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A new float32 Tensor of this shape; ValueError if ``scale`` is not a loss scale.

    It is a copy, because in PyNative mode no operation may assign to a view.
    """
    if scale.size != 1:
        raise ValueError(f"{name} must have the shape () or (1,), got {scale.shape}")
    value = scale.astype(mindspore.float32).asnumpy()
    _checks.loss_scale(name, value.item())
    return Tensor(value.reshape(shape).copy())


def build_train_network(
    network: nn.Cell,
    optimizer: nn.Cell,
    loss_fn: nn.Cell | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> nn.Cell:
    """Build a train step: a drop-in for ``mindspore.amp.build_train_network``, also on the CPU.

    On the CPU, MindSpore's own function refuses loss scaling that skips steps.
    :class:`gradscaler.mindspore.Model` builds its train step in the same way. Both warn if the
    optimizer's ``loss_scale`` is not the scale that the train step leaves in the gradients: that of
    a ``FixedLossScaleManager(drop_overflow_update=False)``, or 1 with any other manager.

    Args:
        network: the network; if ``loss_fn`` is None, a cell that returns the loss.
        optimizer: the optimizer of the network's parameters.
        loss_fn: a cell that computes the loss from the network's output and a label.
        level: the level of mixed precision: "O0", "O1", "O2", "O3" or "auto". "O2" scales the loss
            by a ``DynamicLossScaleManager()`` if ``loss_scale_manager`` is left out.
        boost_level: the level of ``mindspore.boost``: "O0", "O1" or "O2". On the CPU, loss scaling
            that skips steps requires "O0".
        kwargs: ``loss_scale_manager``, ``cast_model_type`` and ``keep_batchnorm_fp32``, as in
            MindSpore's own function.

    Returns:
        A cell in training mode. Call it with data and label, or, without ``loss_fn``, with the
        network's inputs. With a manager that skips steps it returns the loss, the overflow flag and
        the loss scale; otherwise the loss.

    Raises:
        ValueError, TypeError: an argument is not one of those above. Also ValueError on the CPU, if
            a manager that skips steps is combined with a ``boost_level`` above "O0" or with
            MindSpore's accumulation of gradients.

    >>> from gradscaler.mindspore import DynamicLossScaleManager
    >>> network = nn.Dense(2, 1, weight_init="ones")
    >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    >>> step = build_train_network(
    ...     network, optimizer, nn.MSELoss(), loss_scale_manager=DynamicLossScaleManager()
    ... )
    >>> loss, overflow, scale = step(Tensor([[1.0, 2.0]]), Tensor([[4.0]]))
    """
    if level == "O2":
        kwargs.setdefault("loss_scale_manager", DynamicLossScaleManager())
    manager = kwargs.get("loss_scale_manager")
    update_cell = own_update_cell(manager)
    if update_cell is not None:
        kwargs["loss_scale_manager"] = None
    step = _native_build(network, optimizer, loss_fn, level, boost_level, **kwargs)
    return finished(step, optimizer, manager, update_cell)


def finished(
    step: nn.Cell,
    optimizer: nn.Cell,
    manager: amp.LossScaleManager | None,
    update_cell: nn.Cell | None,
) -> nn.Cell:
    """A train step with loss scaling, from one that MindSpore has built.

    Args:
        step: MindSpore has built it with ``manager``, or without if there is an ``update_cell``.
        optimizer: the optimizer of the network's parameters.
        manager: the user's manager.
        update_cell: the result of ``own_update_cell(manager)``.
    """
    if update_cell is not None:
        return _with_loss_scaling(step, manager, update_cell)
    if manager is not None:
        _warn_of_other_scale(optimizer, _left_by(step))
    return step


def own_update_cell(manager: amp.LossScaleManager | None) -> nn.Cell | None:
    """The manager's update cell if MindSpore cannot build the train step itself, else None."""
    wants_amax = amax_interval(getattr(manager, "policy", None)) > 0
    if (wants_amax or on_cpu()) and isinstance(manager, amp.LossScaleManager):
        return manager.get_update_cell()
    return None


def _with_loss_scaling(
    step: nn.Cell, manager: amp.LossScaleManager | None, update_cell: nn.Cell
) -> nn.Cell:
    """A train step with loss scaling, from one that MindSpore has built without ``manager``."""
    if type(step) is not nn.TrainOneStepCell:
        raise ValueError(
            f"{type(manager).__name__} cannot skip the steps of a "
            f"{type(step).__name__}: take boost_level='O0', a network without gradient "
            "accumulation, or FixedLossScaleManager(drop_overflow_update=False)"
        )
    inputs = step.get_inputs()  # set if shapes are dynamic
    step = TrainOneStepWithLossScaleCell(step.network, step.optimizer, update_cell).set_train()
    if isinstance(inputs, dict):
        step.set_inputs(**inputs)
    elif inputs:
        step.set_inputs(*inputs)
    return step


def _warn_of_other_scale(optimizer: Any, scale: float) -> None:
    """Warn if an optimizer's own ``loss_scale`` differs from the scale of the gradients it gets.

    Args:
        optimizer: one of MindSpore's, which divide by their ``loss_scale``, or a wrapper.
        scale: the scale that the train step leaves in the gradients; 1 if it unscales them.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # of a wrapper, such as AdaSum's
    own = getattr(inner, "loss_scale", None)
    if own == scale or not isinstance(own, (int, float)):
        return
    kind = type(inner).__name__
    advice = f"construct it with loss_scale={scale!r}, or use drop_overflow_update=True"
    if scale == 1.0:
        advice = "construct it without loss_scale"
    warnings.warn(
        f"{kind} divides the gradients by its loss_scale, {own!r}, but the train step multiplies "
        f"them by {scale!r}. They are {scale / own:g} times the gradients of the loss: {advice}",
        stacklevel=levels_to_caller("mindspore."),
    )


def _left_by(step: nn.Cell) -> float:
    """The scale that a train step leaves in the gradients for the optimizer."""
    return float(step.sens) if getattr(step, "sense_flag", False) else 1.0
