"""Drop-ins for the loss scalers of DeepSpeed (0.19), with its names."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import distributed

from gradscaler.policies import DynamicScale, FixedScale, ScaleState, _checks
from gradscaler.policies._spelling import changed

logger = logging.getLogger(__name__)


class LossScalerBase:
    """The base class of both scalers.

    All state is in attributes with DeepSpeed's names, which its engine reads, sets and pickles. So
    ``vars(ours).update(vars(theirs))`` moves a run from DeepSpeed's class to this one.

    Args:
        cur_scale: the loss scale.

    Attributes:
        cur_scale: the current loss scale, a float that float32 holds exactly.
        dynamic: whether the scale moves.
    """

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = float(FixedScale(cur_scale).init().scale)
        self.dynamic = False

    def __repr__(self) -> str:
        attributes = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({attributes})"

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.cur_scale

    def scale_gradient(
        self, module: object, grad_in: Iterable[torch.Tensor], grad_out: object
    ) -> tuple[torch.Tensor, ...]:
        """Each of ``grad_in`` times the loss scale, as a backward hook of a module returns them."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Leave the scale as it is. After an overflow, process 0 logs a warning."""
        if overflow and _is_first_process():
            logger.warning("non-finite gradients: the step is skipped at a fixed loss scale")

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, in its dtype."""
        return loss * self.loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A loss scale that never moves: a drop-in for DeepSpeed's ``LossScaler``.

    Args:
        scale: the loss scale.

    Raises:
        ValueError: ``scale`` is not positive and finite in float32.
        TypeError: ``scale`` is not a number.

    >>> scaler = LossScaler(128)
    >>> scaler.loss_scale, scaler.dynamic
    (128.0, False)
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: DeepSpeed's optimizers check the gradients themselves."""
        return False

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> bool:
        return False


class DynamicLossScaler(LossScalerBase):
    """A loss scale that moves: a drop-in for DeepSpeed's ``DynamicLossScaler``.

    The scale halves, but not below ``min_scale``, at the ``delayed_shift``-th overflow since it
    last grew, and at each overflow after that. It doubles when the number of finite steps since the
    last overflow, less one, is a multiple of ``scale_window``, unless float32 cannot hold the
    product. The rule differs from :meth:`gradscaler.DynamicScale.deepspeed` in one point: here, the
    step that grows the scale counts towards the next growth.

    DeepSpeed reduces the overflow over its processes and calls ``update_scale`` with the result.
    ``has_overflow`` checks the gradients of one process.

    Args:
        init_scale: the scale before the first step.
        scale_window: the finite steps between two growths, see above.
        min_scale: the floor, > 0.
        delayed_shift: the hysteresis, the number of the overflow at which the scale backs off;
            earlier overflows leave it.
        consecutive_hysteresis: whether each finite step restarts the count of overflows; if not,
            only growth does.
        raise_error_at_min_scale: whether to raise an error at an overflow that should back off, if
            the scale is already at ``min_scale``.
        dtype: the dtype of the training. DeepSpeed reads it; the rule does not depend on it.

    Attributes:
        cur_iter: the number of the next step, from 0.
        last_overflow_iter: the number of the last step that overflowed; -1 before the first.
        cur_hysteresis: the number of overflows until the scale backs off.
        scale_factor: the factor of growth and the divisor of a backoff; 2.0.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind.

    >>> scaler = DynamicLossScaler(
    ...     8.0, scale_window=2, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
    ... )
    >>> for overflow in [True, False, False, False]:
    ...     scaler.update_scale(overflow)
    ...     print(scaler.loss_scale)
    4.0
    4.0
    4.0
    8.0
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        rule = init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis
        super().__init__(DynamicScale.deepspeed(*rule).init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dynamic = True
        self.dtype = dtype

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of ``params`` holds an Inf or a NaN in this process."""
        grads = [param.grad.detach() for param in params if param.grad is not None]
        # A list, not a generator: all checks are queued before the first is read.
        flags = [self._has_inf_or_nan(grad) for grad in grads]
        return any(map(bool, flags))

    has_overflow = has_overflow_serial

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
        """A boolean scalar on the device of ``x``, found without a mask of the size of ``x``."""
        if x.is_sparse:
            x = x._values()
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.bool, device=x.device)
        # aminmax takes neither complex tensors nor float8.
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        elif x.is_floating_point() and x.dtype.itemsize == 1:
            x = x.float()
        return torch.stack(torch.aminmax(x)).isfinite().logical_not().any()

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step.

        Args:
            overflow: whether the step's gradients held an Inf or a NaN in any process.

        Raises:
            RuntimeError: the scale should back off but is at ``min_scale``, and
                ``raise_error_at_min_scale`` is set; nothing changes.
            ValueError: an attribute was set to a value out of range; nothing changes.
        """
        overflow = bool(overflow)
        policy = _policy(
            self.scale_window,
            self.min_scale,
            self.delayed_shift,
            self.consecutive_hysteresis,
            self.scale_factor,
        )
        # The policy counts from 0 after an overflow, and from 1 after growth.
        stable = self.cur_iter - self.last_overflow_iter - 1
        finite_steps = (stable - 1) % self.scale_window + 1 if stable > 0 else 0
        nonfinite_steps = self.delayed_shift - self.cur_hysteresis
        scale = np.float32(_checks.loss_scale("cur_scale", self.cur_scale))
        state = policy.update(ScaleState(scale, finite_steps, nonfinite_steps), overflow)
        backs_off = overflow and nonfinite_steps + 1 >= self.delayed_shift
        if backs_off and state.scale == scale and self.raise_error_at_min_scale:
            raise RuntimeError(
                f"Current loss scale already at minimum: min_scale is {self.min_scale!r}, and the "
                "gradients still overflow. Gradients that overflow at every scale come from Inf or "
                "NaN in the weights, the data or the loss; with "
                "raise_error_at_min_scale=False the training goes on"
            )
        if overflow:
            self.last_overflow_iter = self.cur_iter
            if _is_first_process():
                before, after = float(scale), float(state.scale)
                logger.info("non-finite gradients: loss scale %g, now %g", before, after)
        self.cur_scale = float(state.scale)
        self.cur_hysteresis = self.delayed_shift - state.nonfinite_steps
        self.cur_iter += 1


@lru_cache
def _policy(
    scale_window: int,
    min_scale: float,
    delayed_shift: int,
    consecutive_hysteresis: bool,
    scale_factor: float,
) -> DynamicScale:
    """The rule that a scaler's attributes describe. They are checked: anyone may have set them."""
    rule = scale_window, min_scale, delayed_shift, consecutive_hysteresis
    policy = DynamicScale.deepspeed(min_scale, *rule)
    factor = _checks.growth_factor("scale_factor", scale_factor)
    return changed(policy, {}, growth_factor=factor, backoff_factor=1 / factor)


def _is_first_process() -> bool:
    """Whether this is process 0, or the only one."""
    is_one_of_many = distributed.is_available() and distributed.is_initialized()
    return not is_one_of_many or distributed.get_rank() == 0
