"""The engine's tensor operations for PyTorch, and for the libraries that port its API."""

from __future__ import annotations

import copy as copying
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from operator import methodcaller
from types import ModuleType
from typing import Any, SupportsFloat, TypeGuard

import numpy as np

from gradscaler._eager.operations import (
    Device,
    FoundInf,
    GradientsRefusedError,
    Optimizer,
    Tensor,
    Watched,
)
from gradscaler._torch_like.float64 import has_float64
from gradscaler._torch_like.norm import norm_on_cpu
from gradscaler.errors import CallOrderError
from gradscaler.policies import Policy, State, leaf_dtypes

_LARGE = 2**14  # elements
_FEW = 8  # parameters, of which an optimizer's step changes at least one
_SOME = 64  # elements of a parameter, which take no memory worth counting
_item = methodcaller("item")


class Fp16GradientsError(GradientsRefusedError, ValueError):
    """A gradient is float16, and float16 gradients were not allowed."""


class SpentGradientsError(GradientsRefusedError, CallOrderError):
    """Optimizers have already used the gradients, in the backward pass."""


class TorchLikeOperations:
    """Implements :class:`gradscaler._eager.operations.Operations`, where methods are documented.

    Args:
        framework: the module that has ``Tensor``, ``full``, ``where``, ``_foreach_mul_``, ...
        group_tensors: the framework's ``_group_tensors_by_device_and_dtype``. It is written in
            C++, and the framework's foreach optimizers use it.
    """

    def __init__(self, framework: ModuleType, group_tensors: Callable[..., Any]) -> None:
        self.framework = framework
        self._group_tensors = group_tensors
        self._inverse: tuple[float, Tensor] | None = None
        self._without_kernel: set[tuple[str, object]] = set()  # pairs of device type and dtype

    # Libraries override these.

    def gradients(self, optimizer: Optimizer, allow_fp16: bool = True) -> list[Tensor]:
        """The dense real tensors that hold the optimizer's gradients. The engine may change them.

        They are detached, so autograd does not record changes.

        Raises:
            ValueError: a gradient is float16 and ``allow_fp16`` is False.
            RuntimeError: optimizers have already used the gradients, in the backward pass.
        """
        parameters = parameters_of(optimizer)
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if len(grads) < len(parameters) and any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in parameters
        ):
            raise SpentGradientsError(
                "optimizers have stepped in the backward pass, on gradients that were multiplied "
                "by the loss scale: leave out _apply_optimizer_in_backward(), and call "
                "scaler.step(optimizer) after the backward pass"
            )
        if not allow_fp16:
            float16 = self.framework.float16
            if float16 in {grad.dtype for grad in grads}:
                raise _fp16_gradient_error(optimizer, float16)
        for grad in grads:
            if grad.requires_grad:  # made with create_graph=True
                return [grad.detach() for grad in grads]
        return grads

    def gradients_to_measure(self, optimizer: Optimizer) -> list[Tensor]:
        """The tensors whose norm is the norm of the optimizer's gradients."""
        return self.gradients(optimizer)

    def device_key(self, device: Device) -> Device:
        """The key of a device's flag in a found_inf."""
        return device

    # Scalars.

    def is_tensor(self, value: object) -> TypeGuard[Tensor]:
        return isinstance(value, self.framework.Tensor)

    def multiply(self, output: Tensor, scale: Tensor) -> Tensor:
        return output * self.on_device(scale, output.device)

    def on_device(self, tensor: Tensor, device: Device) -> Tensor:
        """``tensor`` on ``device``."""
        # Comparing costs less than a to() that has nothing to do.
        return tensor if tensor.device == device else tensor.to(device=device, non_blocking=True)

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor can be read without waiting for a device."""
        return bool(tensor.is_cpu)  # takes a third of the time of comparing devices

    def scalar(self, value: float, device: Device) -> Tensor:
        """A float32 scalar."""
        return self.framework.scalar_tensor(value, dtype=self.framework.float32, device=device)

    def place(self, state: State, device: Device) -> State:
        full, int32 = self.framework.full, self.framework.int32
        leaves = (
            self.scalar(float(value), device)
            if dtype is np.float32
            else full((), value, dtype=int32, device=device)
            for value, dtype in zip(state, leaf_dtypes(state), strict=True)
        )
        return type(state)(*leaves)

    def read(self, state: State) -> State:
        """A placed state as Python floats and ints."""
        return type(state)(*map(_item, state))

    def finite_steps(self, state: State) -> int | None:
        tensor = state.finite_steps
        return tensor.item() if self.on_host(tensor) else None

    def assign(self, state: State, values: State) -> State:
        """Copy ``values`` into the tensors of ``state``; make tensors only for further fields."""
        placed = self.place(values, state.scale.device)
        for tensor, value in zip(state, placed, strict=False):
            tensor.copy_(value)
        return type(placed)(*state[: len(placed)], *placed[len(state) :])

    def copy(self, state: State) -> State:
        return type(state)(*map(self.copy_scale, state))

    def copy_scale(self, scale: Tensor) -> Tensor:
        return scale.clone()

    def next_state(
        self,
        policy: Policy,
        state: State,
        found_infs: list[FoundInf],
        amaxes: Sequence[Tensor] = (),
    ) -> State:
        """The state after one step: new values, and the tensors of ``state`` that do not change."""
        if not self.on_host(state.scale):
            return self.next_on_device(policy, state, found_infs, amaxes)
        found_inf = any(map(self.any_set, found_infs))
        return self.next_on_host(policy, state, found_inf, amaxes)

    def next_on_host(
        self, policy: Policy, state: State, found_inf: bool, amaxes: Sequence[Tensor]
    ) -> State:
        """``next_state`` in host numbers, for tensors that are read without waiting."""
        values = self.read(state)
        amax = {"amax": max(tensor.item() for tensor in amaxes)} if amaxes else {}
        moved = policy.update(values, found_inf, **amax)
        return type(state)(
            *(
                tensor if value == before else float(value)
                for tensor, before, value in zip(state, values, moved, strict=True)
            )
        )

    def next_on_device(
        self,
        policy: Policy,
        state: State,
        found_infs: list[FoundInf],
        amaxes: Sequence[Tensor],
    ) -> State:
        """``next_state`` without waiting for the device."""
        device = state.scale.device
        found_inf = self.combine(found_infs, device) != 0
        amax = {"amax": self.largest(amaxes, device)} if amaxes else {}
        return policy.update(state, found_inf, self.framework.where, **amax)

    def move(self, state: State, values: State) -> State:
        for tensor, value in zip(state, values, strict=True):
            if value is tensor:
                continue
            if self.is_tensor(value):
                tensor.copy_(value)
            else:
                tensor.fill_(value)
        return state

    def merge(self, found_infs: list[FoundInf]) -> FoundInf:
        flags = [flag for found_inf in found_infs for flag in found_inf.values()]
        return {flags[0].device: self.largest(flags, flags[0].device)} if flags else {}

    def any_set(self, found_inf: FoundInf) -> bool:
        for flag in found_inf.values():  # noqa: SIM110 # a generator takes longer for so few
            if flag.item():
                return True
        return False

    def readable(self, found_inf: FoundInf) -> bool | Callable[[], bool]:
        for flag in found_inf.values():
            if not self.on_host(flag):
                return lambda: self.any_set(found_inf)
        return self.any_set(found_inf)

    def combine(self, found_infs: list[FoundInf], device: Device) -> Tensor:
        """One flag on a device, set if any flag is."""
        return self.largest([flag for found in found_infs for flag in found.values()], device)

    def largest(self, scalars: Iterable[Tensor], device: Device) -> Tensor:
        """The largest of scalars, on a device."""
        on_device = [self.on_device(scalar, device) for scalar in scalars]
        return reduce(self.framework.maximum, on_device)

    # Gradients.

    def grouped(self, tensors: list[Tensor]) -> list[tuple[Device, list[Tensor]]]:
        """The tensors in lists of one device and dtype, each list with its device."""
        if not tensors:
            return []
        if _are_alike(tensors):  # takes half the time of grouping
            return [(tensors[0].device, tensors)]
        groups = self._group_tensors([tensors]).items()
        return [(device, group) for (device, _), ((group,), _) in groups]

    def unscale_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor | None = None,
        allow_fp16: bool = True,
    ) -> dict[Device, Tensor]:
        """Multiply the gradients by ``inv_scale`` in place, and flag each device's non-finite ones.

        Args:
            optimizer: the optimizer that owns the gradients.
            inv_scale: 1/scale, a float32 scalar.
            found_inf: the initial value of each flag; None for 0.
            allow_fp16: whether to unscale float16 gradients; if False, they raise.

        Raises:
            ValueError: a gradient is float16 and ``allow_fp16`` is False.
        """
        flags: dict[Device, Tensor] = {}
        for device, grads in self.grouped(self.gradients(optimizer, allow_fp16)):
            key = self.device_key(device)
            if key not in flags:
                flags[key] = (
                    self.scalar(0.0, device)
                    if found_inf is None
                    else self.on_device(found_inf.clone(), device)
                )
            self.check_and_unscale_(grads, flags[key], self.on_device(inv_scale, device))
        return flags

    def check_and_unscale_(self, grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> None:
        """Multiply tensors of one device and dtype in place, and set the flag if any is not finite.

        Non-finite tensors are multiplied, too. The framework's kernel does both in one pass. It
        lacks some dtypes and devices: PyTorch's for CUDA, for example, lacks bfloat16.
        """
        if self._without_kernel and _kind_of(grads) in self._without_kernel:
            self._check_then_unscale_(grads, flag, inv_scale)
            return
        try:
            self.framework._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale)
        except RuntimeError as error:  # raised before anything changed
            is_missing = isinstance(error, NotImplementedError)
            if not is_missing and "not implemented for" not in str(error):
                raise
            self._without_kernel.add(_kind_of(grads))
            self._check_then_unscale_(grads, flag, inv_scale)

    def _check_then_unscale_(self, grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> None:
        """``check_and_unscale_`` in two passes, by operations that exist for every dtype."""
        framework = self.framework
        if grads[0].dtype == framework.float64 or not has_float64(framework, grads[0].device):
            is_set = framework.stack([(~grad.isfinite()).any() for grad in grads]).any().float()
        else:  # few calls, however many gradients there are
            is_set = _nonfinite(self.norm_on_device(grads))
        flag.copy_(framework.maximum(flag, is_set))
        framework._foreach_mul_(grads, inv_scale)

    def first_step_must_be_finite(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that skips by itself would corrupt its state by skipping now.

        Fused SGD allocates uninitialized momentum in its first step, and writes it only if that
        step is not skipped.
        """
        return isinstance(optimizer, self.framework.optim.SGD) and any(
            group["momentum"] != 0 and "momentum_buffer" not in optimizer.state.get(parameter, ())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )

    def may_omit_flag(self, optimizer: Optimizer) -> bool:
        """Whether a finite step may leave out the optimizer's flag.

        The framework's own optimizers take None for it, and are faster then: they subtract a flag
        from each parameter's count of steps.
        """
        return type(optimizer).__module__.startswith(f"{self.framework.__name__}.optim.")

    def inverse(self, scale: Tensor) -> tuple[SupportsFloat, Tensor]:
        """A copy of the scale for the record, and 1/scale as a float32 scalar on its device.

        It is computed in float64, if the device has it, and rounded once, because some builds
        divide float32 inexactly.
        Do not change it in place: it is cached until another scale is inverted.
        """
        if self.on_host(scale):
            used = scale.item()
            inverse = self._inverse  # most steps use the scale of the step before
            # Threads may race here. Each returns its own pair, so none gets another's.
            if inverse is None or inverse[0] != used:
                inverse = self._inverse = used, self.scalar(1.0 / used, scale.device)
            return inverse
        if not has_float64(self.framework, scale.device):
            return scale.clone(), scale.reciprocal()
        wide = scale.double()
        return wide, wide.reciprocal().float()

    def measure(
        self, optimizer: Optimizer, scale: Tensor
    ) -> tuple[Tensor, SupportsFloat, Tensor, FoundInf] | None:
        groups = self.grouped(self.gradients_to_measure(optimizer))
        device, grads = groups[0] if groups else (scale.device, [])
        if len(groups) > 1 or device != scale.device or not self.can_measure(grads):
            return None
        used, inv_scale = self.inverse(scale)
        if self.on_host(scale) and float(used) < 1:  # squares of scaled gradients might underflow
            return None
        norm_and_flag = self.norm_and_flag(grads)
        if norm_and_flag is None:
            return None
        norm, flag = norm_and_flag
        flags = {self.device_key(scale.device): flag} if grads else {}
        return (norm * inv_scale).float(), used, inv_scale, flags

    def norm_and_flag(self, grads: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The 2-norm of float32 tensors, and a flag if one is not finite, in one pass over them.

        None if all are finite but their norm overflows.
        """
        if not grads or self.on_host(grads[0]):
            norm = norm_on_cpu(self.framework, grads)
            finite = math.isfinite(norm.item())
            if not finite and all(map(_is_finite, grads)):
                return None
            return norm, self.scalar(float(not finite), norm.device)
        norm = self.norm_on_device(grads)
        return norm, _nonfinite(norm)

    def norm_on_device(self, grads: list[Tensor]) -> Tensor:
        """The 2-norm of narrower tensors, in float64, where no sum of their squares overflows.

        So it is finite if and only if all tensors are.
        """
        norms = self.framework._foreach_norm(grads, 2, dtype=self.framework.float64)
        return self.framework.linalg.vector_norm(self.framework.stack(norms))

    def nonfinite_flag(self, grads: list[Tensor]) -> Tensor:
        """A flag that is set if any of some float32 tensors is not finite, in one pass."""
        if not self.on_host(grads[0]):
            return _nonfinite(self.norm_on_device(grads))
        # A finite sum proves that all are finite, and takes less time than a norm.
        total = self.framework.stack([grad.sum() for grad in grads]).sum().item()
        finite = math.isfinite(total) or all(map(_is_finite, grads))
        return self.scalar(float(not finite), grads[0].device)

    def can_measure(self, grads: list[Tensor]) -> bool:
        """Whether ``norm_and_flag`` takes these gradients.

        They must be float32, on a device that has float64, and not of a subclass of tensors: for a
        sharded tensor, each process would find only its own shard's flag.
        """
        return not grads or (
            grads[0].dtype == self.framework.float32
            and has_float64(self.framework, grads[0].device)
            and set(map(type, grads)) == {self.framework.Tensor}
        )

    def check(self, optimizer: Optimizer) -> dict[Device, Tensor]:
        """Flag each device's non-finite gradients, and change none."""
        flags: dict[Device, Tensor] = {}
        for device, grads in self.grouped(self.gradients(optimizer)):
            key = self.device_key(device)
            if key not in flags:
                flags[key] = self.scalar(0.0, device)
            # For large gradients a norm or a sum is faster than unscaling by 1, which writes all
            # that it reads. For small ones it is slower, because it makes more calls.
            large = [grad for grad in grads if grad.numel() >= _LARGE]
            if large and self.can_measure(large):
                flags[key] = self.framework.maximum(flags[key], self.nonfinite_flag(large))
                grads = [grad for grad in grads if grad.numel() < _LARGE]
            if grads:
                self.check_and_unscale_(grads, flags[key], self.scalar(1.0, device))
        return flags

    def amax(self, optimizer: Optimizer, scale: Tensor | None) -> Tensor:
        amax = self.total_norm(optimizer, math.inf).float()
        return amax if scale is None else amax * self.on_device(self.inverse(scale)[1], amax.device)

    def total_norm(self, optimizer: Optimizer, norm_type: float) -> Tensor:
        """The norm by the operations of ``nn.utils.get_total_norm``, without its ``no_grad()``."""
        measured = self.gradients_to_measure(optimizer)
        grads = [grad.detach() for grad in measured if grad.numel()]  # an inf-norm needs elements
        if not grads:
            return self.framework.tensor(0.0)
        norms = [
            self.on_device(norm, grads[0].device)
            for (group,), _ in self._group_tensors([grads]).values()
            for norm in self.framework._foreach_norm(group, norm_type)
        ]
        return self.framework.linalg.vector_norm(self.framework.stack(norms), norm_type)

    def clip_coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        return self.framework.clamp(max_norm / (norm + 1e-6), max=1.0)

    def multiply_gradients_(self, optimizer: Optimizer, factor: Tensor) -> None:
        for device, grads in self.grouped(self.gradients(optimizer)):
            self.framework._foreach_mul_(grads, self.on_device(factor, device))

    def current_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        grads = [grad for p in parameters_of(optimizer) if (grad := p.grad) is not None]
        return [grad._values() if grad.is_sparse else grad for grad in grads]

    def are_new(self, gradients: list[Tensor], stale: list[Tensor]) -> bool:
        # A backward pass adds to a gradient in place, so a sum has the address of its first part.
        places = {grad.data_ptr() for grad in stale}
        return places.isdisjoint(grad.data_ptr() for grad in gradients)

    def clear_gradients(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    # Repetitions.

    def save_gradients(self, optimizer: Optimizer) -> Callable[[], None]:
        saved = [
            (parameter, None if parameter.grad is None else parameter.grad.detach().clone())
            for parameter in parameters_of(optimizer)
        ]

        def restore() -> None:
            for parameter, value in saved:
                grad = parameter.grad
                if value is None:
                    parameter.grad = None
                elif grad is None or grad.is_sparse or value.is_sparse:
                    parameter.grad = value.clone()
                else:  # in place: others may hold the tensor, as DDP's buckets do
                    _overwrite(grad, value)

        return restore

    def save_values(self, tensors: list[Tensor]) -> Callable[[], None]:
        saved = [(tensor, tensor.detach().clone()) for tensor in tensors]

        def restore() -> None:
            for tensor, value in saved:
                _overwrite(tensor, value)

        return restore

    def save_random_state(self, optimizer: Optimizer) -> Callable[[], None]:
        set_rng_state = self.framework.set_rng_state
        restorers = [partial(set_rng_state, self.framework.get_rng_state())]
        for device in {parameter.device for parameter in parameters_of(optimizer)}:
            module: Any = getattr(self.framework, device.type, None)
            if device.type != "cpu" and hasattr(module, "set_rng_state"):
                named = () if device.type == "mps" else (device,)
                state = module.get_rng_state(*named)
                restorers.append(partial(module.set_rng_state, state, *named))

        def restore() -> None:
            for put_back in restorers:
                put_back()

        return restore

    def enable_grad(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.framework.enable_grad()
        return context

    def watch(self, optimizer: Optimizer) -> Callable[[], bool]:
        def seen() -> list[tuple[int, ...]]:
            return [
                (p._version,)
                if p.grad is None
                else (p._version, p.grad.data_ptr(), p.grad._version)
                for p in parameters_of(optimizer)
            ]

        before = seen()
        return lambda: seen() == before

    def can_watch(self, scaled: Tensor) -> bool:
        return bool(scaled.requires_grad)

    def watch_backward(self, scaled: Tensor, watched: Callable[[], Watched | None]) -> None:
        at_end = self.framework.autograd.Variable._execution_engine.queue_callback

        def begin(_: Tensor) -> None:
            gradients = watched()
            if gradients is None:
                return
            are_untouched = self._watch_gradients(gradients.optimizer)

            def end() -> None:
                if not are_untouched():
                    gradients.note_mixed()

            # After the callbacks that others queue in this pass: FSDP's write gradients.
            at_end(lambda: at_end(end))

        scaled.register_hook(begin)

    def _watch_gradients(self, optimizer: Optimizer) -> Callable[[], bool]:
        """A callable that returns whether a backward pass has added to none of the gradients.

        It waits for no device, except for gradients in a buffer that another gradient has changed.
        """
        # A view shares its count of changes with its buffer, as flat_gradients and DDP keep them.
        before = [
            (grad, grad._version, grad.detach().clone() if _is_view(grad) else None)
            for grad in self.current_gradients(optimizer)
        ]

        def is_untouched(now: Tensor, grad: Tensor, version: int, copy: Tensor | None) -> bool:
            if now.data_ptr() != grad.data_ptr():
                return False
            return now._version == version or (copy is not None and _are_same(copy, now.detach()))

        def are_untouched() -> bool:
            now = self.current_gradients(optimizer)
            return len(now) == len(before) and all(
                is_untouched(each, *noted) for each, noted in zip(now, before, strict=True)
            )

        return are_untouched

    def watch_steps(self, optimizer: Optimizer, closely: bool) -> Callable[[], bool]:
        # By value, because a fused step raises no tensor's version.
        parameters = parameters_of(optimizer)
        trained = [p for p in parameters[0 if closely else -_FEW :] if p.grad is not None]
        few = sorted(trained, key=methodcaller("numel"))[: _FEW if closely else 1]
        before = [part.clone() for part in map(_first_part, self.values(few))]
        return lambda: all(map(_are_same, before, map(_first_part, self.values(few))))

    def values(self, parameters: list[Tensor]) -> list[Tensor]:
        """The tensors that hold the values of parameters in this process."""
        return [parameter.detach() for parameter in parameters]

    def snapshot(self, optimizer: Optimizer) -> Callable[[], None]:
        parameters = parameters_of(optimizer)
        values = [parameter.detach().clone() for parameter in parameters]
        state = {key: copying.deepcopy(value) for key, value in optimizer.state.items()}
        options: list[dict[str, Any]] = [
            {key: copying.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

        def restore() -> None:
            for parameter, value in zip(parameters, values, strict=True):
                _overwrite(parameter, value)
            optimizer.state.clear()  # in place: schedulers and wrappers hold this dict
            optimizer.state.update(state)
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                of_group = group["params"]
                group.clear()
                group.update(params=of_group, **saved)

        return restore


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another; TensorPlay does not say, and keeps no gradient so."""
    return getattr(tensor, "_base", None) is not None


def _first_part(value: Tensor) -> Tensor:
    """The first elements of a tensor, as a view of most."""
    return value if value.numel() <= _SOME else value.reshape(-1)[:_SOME]


def _are_same(before: Tensor, now: Tensor) -> bool:
    """Whether each element has its value from before, or was NaN; waits for the device."""
    is_number = before == before  # noqa: PLR0124 # NaN differs from itself
    return not ((before != now) & is_number).any().item()


def _kind_of(tensors: list[Tensor]) -> tuple[str, object]:
    """The type of device and the dtype of tensors that share both."""
    return tensors[0].device.type, tensors[0].dtype


def _are_alike(tensors: list[Tensor]) -> bool:
    """Whether all tensors have one device and dtype."""
    device, dtype = tensors[0].device, tensors[0].dtype
    for tensor in tensors:  # noqa: SIM110 # a generator takes longer for few of them
        if tensor.dtype != dtype or tensor.device != device:
            return False
    return True


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a tensor, even one that is a leaf and requires a gradient.

    ``detach()`` allows that without ``no_grad()``, whose exit an interrupt could prevent, so that
    gradients would stay switched off.
    """
    tensor.detach().copy_(value)


def _nonfinite(norm: Tensor) -> Tensor:
    """1.0 if a norm is Inf or NaN, else 0.0."""
    flag: Tensor = (norm * 0.0).ne(0.0).float()
    return flag


def _is_finite(grad: Tensor) -> bool:
    """Whether all elements are finite, without the mask that ``isfinite`` allocates."""
    extremes = (grad.min(), grad.max()) if grad.numel() else ()
    return all(math.isfinite(extreme.item()) for extreme in extremes)


def _fp16_gradient_error(optimizer: Optimizer, float16: object) -> Fp16GradientsError:
    """The error for float16 gradients, which names the first such parameter."""
    name = next(
        _name(optimizer, parameter)
        for parameter in parameters_of(optimizer)
        if parameter.grad is not None and parameter.grad.dtype == float16
    )
    return Fp16GradientsError(
        f"Attempting to unscale FP16 gradients. The gradient of {name} is float16: keep the "
        "parameters in float32 and run the forward pass under autocast, or construct "
        "GradScaler(allow_fp16_gradients=True)"
    )


def _name(optimizer: Optimizer, parameter: Tensor) -> str:
    """The parameter's name if the optimizer knows it, else its position in the optimizer."""
    for g, group in enumerate(optimizer.param_groups):
        for i, other in enumerate(group["params"]):
            if other is parameter:
                names = group.get("param_names")
                place = repr(names[i]) if names else f"{i} of parameter group {g}"
                return f"parameter {place}, shape {tuple(parameter.shape)},"
    raise LookupError("not one of the optimizer's parameters")
