"""The engine's tensor operations for Paddle.

The state is kept on the host, as a NumPy float32 and two ints: a step reads found_inf on the host
in any case, and reading a tensor takes longer than the whole rule.
"""

from __future__ import annotations

import copy as copying
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
import paddle
from paddle.base import core

from gradscaler._eager.operations import (
    Device,
    FoundInf,
    GradientsRefusedError,
    Optimizer,
    Tensor,
    Watched,
)
from gradscaler.paddle._small_tensors import batches_of_small, small_by_shape
from gradscaler.policies import Policy, State

_C_ops: ModuleType = paddle._C_ops  # has the kernel of Paddle's own scaler; not all of it is typed
_eager: ModuleType = core.eager

_HALF = (paddle.float16, paddle.bfloat16)
_FEW = 8  # parameters, of which an optimizer's step changes at least one
_SOME = 64  # elements of a parameter, which take no memory worth counting


class SparseGradientsError(GradientsRefusedError, NotImplementedError):
    """Paddle cannot unscale sparse gradients."""


def is_tensor(value: object) -> TypeGuard[paddle.Tensor]:
    return isinstance(value, paddle.Tensor)


def multiply(output: Tensor, scale: np.float32) -> Tensor:
    return output * _C_ops.full([1], float(scale), paddle.float32, output.place)


def place(state: State, device: Device) -> State:
    return state


def read(state: State) -> State:
    return state


def finite_steps(state: State) -> int:
    return int(state.finite_steps)


def next_state(
    policy: Policy, state: State, found_infs: list[FoundInf], amaxes: Sequence[np.float32] = ()
) -> State:
    amax: dict[str, Tensor] = {"amax": max(amaxes)} if amaxes else {}
    return policy.update(state, any(map(any_set, found_infs)), **amax)


def move(state: State, values: State) -> State:
    return values


def copy(state: State) -> State:
    return state


def copy_scale(scale: np.float32) -> np.float32:
    return scale


def merge(found_infs: list[FoundInf]) -> FoundInf:
    flags = [found_inf for found_inf in found_infs if found_inf]
    return {"found_inf": any(map(any_set, flags))} if flags else {}


def any_set(found_inf: FoundInf) -> bool:
    return any(map(is_set, found_inf.values()))


readable = any_set  # a step has read the flag in any case


def is_set(flag: bool | Tensor) -> bool:
    """Whether a flag is set."""
    return bool(flag.item() if is_tensor(flag) else flag)  # bool(tensor) takes longer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in the order of its groups."""
    groups = getattr(optimizer, "_param_groups", None)
    if groups and isinstance(groups[0], dict):
        return [parameter for group in groups for parameter in group["params"]]
    return list(optimizer._parameter_list or ())


def gradients(optimizer: Optimizer) -> list[list[Tensor]]:
    """The optimizer's gradients in lists of one dtype each. The engine may change them.

    They are detached, so autograd does not record changes. ``no_grad()`` would do the same, but an
    interrupt at its exit would leave gradients switched off.

    Raises:
        NotImplementedError: a gradient is sparse.
    """
    parameters = parameters_of(optimizer)
    # C++ groups them, because asking a tensor for its dtype is slow; it knows only three dtypes.
    by_dtype: list[list[Tensor]] = list(filter(None, _eager.get_grads_lists(parameters)))
    if sum(map(len, by_dtype)) < len(parameters):
        grads = [grad for p in parameters if (grad := p._grad_ivar()) is not None]
        dtypes = {grad.dtype for grad in grads}
        by_dtype = [[grad for grad in grads if grad.dtype == dtype] for dtype in dtypes]
    for grad in itertools.chain.from_iterable(by_dtype):
        if grad.is_selected_rows():
            raise SparseGradientsError(f"{grad.name} is sparse: Paddle cannot unscale it")
    return [[grad.detach() for grad in grads] for grads in by_dtype]


def inverse(scale: np.float32) -> tuple[np.float32, np.float32]:
    return scale, scale  # Paddle's kernel divides


def unscale_(optimizer: Optimizer, scale: np.float32) -> FoundInf:
    """Divide the gradients by ``scale`` in place; return one flag, or none without gradients.

    The flag is a bool if reading it waits for no device, else a tensor of shape [1].
    """
    found_infs: list[Any] = []
    for grads in gradients(optimizer):
        # Paddle's kernel reads any gradient as if it were contiguous. On the CPU it is slow, takes
        # no half precision, and after an overflow zeroes gradients instead of unscaling them.
        on_cpu = grads[0].place.is_cpu_place()
        fit = [grad for grad in grads if not on_cpu and grad.is_contiguous()]
        rest = [grad for grad in grads if on_cpu or not grad.is_contiguous()]
        if fit:
            found_infs.append(_unscale_at_once_(fit, float(scale)))
        if rest:
            found_infs.append(not _all_finite(rest))
            _multiply_(rest, 1.0 / float(scale))
    if not found_infs:
        return {}
    return {"found_inf": functools.reduce(operator.or_, found_infs)}


def check(optimizer: Optimizer) -> FoundInf:
    """A flag, a bool, that says whether a gradient is not finite; empty without gradients."""
    groups = gradients(optimizer)
    return {"found_inf": not all(map(_all_finite, groups))} if groups else {}


def _unscale_at_once_(grads: list[Tensor], scale: float) -> Tensor:
    wide = grads[0].dtype == paddle.float64
    divisor = paddle.full([1], scale, dtype="float64" if wide else "float32")
    return _C_ops.check_finite_and_unscale_(grads, divisor)[1]


def _all_finite(grads: list[Tensor]) -> bool:
    """Whether no element is Inf or NaN."""
    wide = [grad.astype("float32") for grad in grads] if grads[0].dtype in _HALF else grads
    # A finite sum of squares proves it, and is fast.
    if math.isfinite(_squared_norm(wide).item()):
        return True
    return all(_C_ops.isfinite(grad).all().item() for grad in grads)


def _squared_norm(grads: list[Tensor]) -> Tensor:
    """The sum of the squares of tensors of one dtype, of shape [1]."""
    batches, others = batches_of_small(grads)
    read = itertools.chain((_C_ops.stack(batch, 0) for batch in batches), others)
    return _C_ops.add_n(list(map(_C_ops.squared_l2_norm, read)))


def measure(
    optimizer: Optimizer, scale: np.float32
) -> tuple[Tensor, np.float32, Tensor, FoundInf] | None:
    if scale < 1:  # squares of scaled gradients might underflow
        return None
    groups = gradients(optimizer)
    if len(groups) != 1 or groups[0][0].dtype != paddle.float32:
        return None
    squared = _squared_norm(groups[0])
    if not math.isfinite(squared.item()):
        return None
    inv_scale = paddle.full([], 1.0 / float(scale), dtype="float32")
    return squared.sqrt().reshape([]) * inv_scale, scale, inv_scale, {"found_inf": False}


def _multiply_(grads: list[Tensor], factor: float) -> None:
    """Multiply gradients of one dtype in place.

    Those of half precision are multiplied in float32, because float16 may not hold the factor.
    """
    # The bias is -0.0: adding 0.0 would turn -0.0 into 0.0.
    if grads[0].dtype in _HALF:
        for grad in grads:
            product = _C_ops.scale(grad.astype("float32"), factor, -0.0, True)
            grad.set_value(product.astype(grad.dtype))
    else:
        for grad in _multiply_small_(grads, factor):
            _C_ops.scale_(grad, factor, -0.0, True)


def _multiply_small_(grads: list[Tensor], factor: float) -> list[Tensor]:
    """Multiply many small gradients in one call; return those that it did not multiply.

    No kernel of Paddle only multiplies a list of tensors by a number. The momentum kernel does it
    as a part: ``velocity = factor * velocity + gradient; parameter -= rate * velocity``. Here its
    gradients are -0.0, which changes no sum, and its parameters are dummies.
    """
    if grads[0].dtype != paddle.float32 or not grads[0].place.is_cpu_place():
        return grads  # the kernel's factor is a float32
    fit: list[Tensor] = []  # those that the kernel takes
    rest: list[Tensor] = []
    for grad in grads:
        (fit if grad.is_contiguous() and not grad.is_dist() else rest).append(grad)
    by_shape, others = small_by_shape(fit)
    if not by_shape:
        return grads
    velocities: list[Tensor] = []
    gradients: list[Tensor] = []
    parameters: list[Tensor] = []
    for shape, alike in by_shape.items():
        velocities += alike
        gradients += [paddle.full(shape, -0.0)] * len(alike)
        parameters += [paddle.zeros(shape)] * len(alike)
    rates = [paddle.zeros([1])] * len(velocities)
    options: Any = (False, [], [], False, 1.0)  # no Nesterov, no regularization, one precision
    _C_ops.merged_momentum_(parameters, gradients, velocities, rates, None, factor, *options)
    return others + rest


def amax(optimizer: Optimizer, scale: np.float32 | None) -> np.float32:
    found = largest(grad for group in gradients(optimizer) for grad in group)
    return found if scale is None else found * np.float32(1.0 / float(scale))


def largest(grads: Iterable[Tensor]) -> np.float32:
    """The largest magnitude in these gradients."""
    sized = [grad.detach() for grad in grads if grad.size]
    wide = [grad.astype("float32") if grad.dtype in _HALF else grad for grad in sized]
    return np.float32(max((grad.abs().max().item() for grad in wide), default=0.0))


def total_norm(optimizer: Optimizer, norm_type: float) -> Tensor:
    grads = [grad for group in gradients(optimizer) for grad in group]
    if not grads:
        return paddle.zeros([])
    wide = "float64" if any(g.dtype == paddle.float64 for g in grads) else "float32"
    norms = paddle.stack([_norm(grad.astype(wide), norm_type) for grad in grads])
    if math.isinf(norm_type) and any(paddle.isnan(grad).any().item() for grad in grads):
        return paddle.full([], math.nan, norms.dtype)  # Paddle's maximum may drop a NaN
    return paddle.linalg.vector_norm(norms, norm_type)


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    if not grad.is_dist():
        return paddle.linalg.vector_norm(grad, norm_type)
    # For a tensor on a mesh, Paddle's norm would be the sum of its shards' norms.
    if math.isinf(norm_type):
        return grad.abs().max()
    if norm_type == 0:
        return (grad != 0).astype(grad.dtype).sum()
    return (grad.abs() ** norm_type).sum() ** (1.0 / norm_type)


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    return paddle.clip(max_norm / (norm + 1e-6), max=1.0)


def multiply_gradients_(optimizer: Optimizer, factor: Tensor) -> None:
    for grads in gradients(optimizer):
        _multiply_(grads, factor.item())


def current_gradients(optimizer: Optimizer) -> list[Tensor]:
    grads = [grad for p in parameters_of(optimizer) if (grad := p._grad_ivar()) is not None]
    return [grad for grad in grads if not grad.is_selected_rows()]


def are_new(gradients: list[Tensor], stale: list[Tensor]) -> bool:
    # A backward pass adds to a gradient in place, so a sum has the address of its first part.
    places = {grad.data_ptr() for grad in stale}
    return places.isdisjoint(grad.data_ptr() for grad in gradients)


def clear_gradients(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.clear_gradient(False)


def save_gradients(optimizer: Optimizer) -> Callable[[], None]:
    saved = []
    for parameter in parameters_of(optimizer):
        grad = parameter._grad_ivar()
        saved.append((parameter, None if grad is None else grad.detach().clone()))

    def restore() -> None:
        for parameter, value in saved:
            if value is None:
                parameter.clear_gradient(False)
            else:
                parameter._grad_ivar().set_value(value)

    return restore


def save_values(tensors: list[Tensor]) -> Callable[[], None]:
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore() -> None:
        for tensor, value in saved:
            tensor.set_value(value)

    return restore


def save_random_state(optimizer: Optimizer) -> Callable[[], None]:
    return functools.partial(paddle.set_rng_state, paddle.get_rng_state())


def _copied(value: object, tensors: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A copy of nested containers with the same tensors, whose values are saved in ``tensors``."""
    if isinstance(value, paddle.Tensor):
        tensors.setdefault(id(value), (value, value.detach().clone()))
        return value
    if isinstance(value, dict):
        twin = copying.copy(value)
        twin.update((key, _copied(item, tensors)) for key, item in value.items())
        return twin
    if isinstance(value, (list, set)):
        return type(value)(_copied(item, tensors) for item in value)
    return value


def snapshot(optimizer: Optimizer) -> Callable[[], None]:
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    for parameter in parameters_of(optimizer):
        _copied(parameter, tensors)
    saved = {
        name: _copied(value, tensors)
        for name, value in vars(optimizer).items()
        if isinstance(value, (dict, list, set))
        and name not in ("_parameter_list", "_param_groups", "_params")
    }

    def restore() -> None:
        optimizer.__dict__.update(saved)
        for tensor, value in tensors.values():
            tensor.set_value(value)

    return restore


def watch(optimizer: Optimizer) -> Callable[[], bool]:
    # By value: Paddle's count of changes misses set_value() and the steps of its optimizers.

    def seen() -> list[Tensor]:
        parameters = parameters_of(optimizer)
        grads = [grad for p in parameters if (grad := p._grad_ivar()) is not None]
        return [*parameters, *grads]

    before = [tensor.detach().clone() for tensor in seen()]

    def is_untouched() -> bool:
        now = seen()
        return len(now) == len(before) and all(
            bool(paddle.equal_all(tensor, value)) for tensor, value in zip(now, before, strict=True)
        )

    return is_untouched


def can_watch(scaled: Tensor) -> bool:
    return not scaled.stop_gradient


def watch_backward(scaled: Tensor, watched: Callable[[], Watched | None]) -> None:
    # Paddle does not count the changes that a backward pass makes, so each parameter has a hook
    # while the pass runs.
    def begin(_: Tensor) -> None:
        gradients = watched()
        if gradients is None:
            return
        note = gradients.note_mixed
        trained = [p for p in parameters_of(gradients.optimizer) if not p.stop_gradient]
        hooks = [(p, p._register_grad_hook(lambda _: note())) for p in trained]

        def end() -> None:
            for parameter, number in hooks:
                parameter._remove_grad_hook(number)

        _eager._add_backward_final_hook(end)

    scaled.register_hook(begin)


def watch_steps(optimizer: Optimizer, closely: bool) -> Callable[[], bool]:
    parameters = parameters_of(optimizer)[0 if closely else -_FEW :]
    trained = [p for p in parameters if p._grad_ivar() is not None]
    few = sorted(trained, key=operator.attrgetter("size"))[: _FEW if closely else 1]
    before = [part.clone() for part in map(_first_part, few)]
    return lambda: all(map(_are_same, before, map(_first_part, few)))


def _first_part(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value if value.size <= _SOME else value.reshape([-1])[:_SOME]


def _are_same(before: Tensor, now: Tensor) -> bool:
    """Whether each element has its value from before, or was NaN; waits for the device."""
    return not ((before != now.detach()) & ~paddle.isnan(before)).any().item()


def enable_grad() -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = paddle.enable_grad()
    return context
