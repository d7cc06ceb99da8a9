"""``mindspore.nn``'s train step with loss scaling, and what builds one for ``mindspore.Model``."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, amp, nn, ops

from gradscaler.mindspore.gradients import all_finite, unscale_all
from gradscaler.mindspore.managers import DynamicLossScaleManager


class TrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):  # type: ignore[misc] # untyped
    """A train step that skips what overflowed: ``mindspore.nn.TrainOneStepWithLossScaleCell``.

    Called with the network's inputs, it returns the loss, whether the step overflowed, and the
    loss scale. 
    """

    def __init__(self, network: Any, optimizer: Any, scale_sense: Any) -> None:
        super().__init__(network, optimizer, scale_sense)
        self.cpu_target = mindspore.get_context("device_target") == "CPU"

    def construct(self, *inputs: Any) -> Any:
        """The loss, whether the step overflowed (bool), and the loss scale."""
        loss = self.network(*inputs)
        scale = self.scale_sense
        status = Tensor([0] * 8, mindspore.int32)
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.grad_reducer(unscale_all(scale, *grads))
        overflow = self.get_overflow_status(status, grads)
        if not self.process_loss_scale(overflow):
            loss = ops.depend(loss, self.optimizer(grads))
        return loss, overflow, scale

    def get_overflow_status(self, status: Any, compute_output: Any) -> Any:
        """Whether a gradient holds an Inf or a NaN: a bool Tensor of shape ()."""
        if not self.cpu_target:
            return super().get_overflow_status(status, compute_output)
        overflow = ops.logical_not(all_finite(compute_output))
        if self.is_distributed:
            overflow = self.allreduce(overflow.astype(mindspore.float32)) > 0
        return overflow


def build_train_network(
    network: Any,
    optimizer: Any,
    loss_fn: Any = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> Any:
    """Build."""
    kwargs.setdefault("loss_scale_manager", DynamicLossScaleManager() if level == "O2" else None)
    manager = kwargs["loss_scale_manager"]
    on_cpu = mindspore.get_context("device_target") == "CPU"
    cell = manager.get_update_cell() if on_cpu and isinstance(manager, amp.LossScaleManager) else None
    if cell is None:
        return amp.build_train_network(network, optimizer, loss_fn, level, boost_level, **kwargs)
    kwargs["loss_scale_manager"] = None
    step = amp.build_train_network(network, optimizer, loss_fn, level, boost_level, **kwargs)
    if type(step) is not nn.TrainOneStepCell:
        raise ValueError("...")
    return TrainOneStepWithLossScaleCell(step.network, optimizer, cell).set_train()
