"""Keras on PyTorch in many processes: an overflow in one skips in all, and all clip by one norm."""

import functools
import os

import pytest

if os.environ.get("KERAS_BACKEND") != "torch":
    pytest.skip("of PyTorch", allow_module_level=True)

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradscaler import DynamicScale, ParameterError, ScaleMismatchError
from gradscaler.keras import LossScaleOptimizer

WORLD = 2
INPUTS = np.random.default_rng(0).standard_normal((6, 2 * WORLD, 4)).astype("float32")
BAD_STEPS = (1, 3)
POLICY = DynamicScale(init_scale=1024.0, growth_interval=2, hysteresis=2, hysteresis_reset="growth")
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "Adam": lambda: keras.optimizers.Adam(0.1, clipnorm=0.05, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=3),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2),
}


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().numpy()


def module():
    """Its last bias has one element: one of two processes has no part of it."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def keras_module():
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((4,)), dense(3, "tanh"), dense(1)])


def steps(call, variables, optimizer, inputs, how, bad=True):
    """A training of Keras on PyTorch, in which the gradients of a ``bad`` process overflow.

    Args:
        call: the model.
        variables: the weights.
        optimizer: the wrapper.
        inputs: one batch for each step.
        how: "loss" or "part" of the gradients overflows; or "minimize" takes the steps.
        bad: whether this process is the one.
    """
    seen = []
    for step, batch in enumerate(inputs):
        overflows = bad and step in BAD_STEPS
        factor = float("inf") if overflows and how != "part" else 1.0

        def loss(batch=batch, factor=factor):
            return (call(torch.tensor(batch)) ** 2).mean() * factor

        if how == "minimize":
            optimizer.minimize(loss, variables)
        else:
            for variable in variables:
                variable.value.grad = None
            optimizer.scale_loss(loss()).backward()
            grads = [variable.value.grad for variable in variables]
            if overflows and how == "part":
                parts = [grad.to_local() for grad in grads]
                next(part for part in parts if part.numel()).view(-1)[-1] = float("inf")
            with torch.no_grad():
                optimizer.apply(grads, variables)
        counts = [int(count) for count in (optimizer.iterations, *optimizer._moved[1:])]
        seen.append((float(optimizer.loss_scale), *counts))
    kept = [*variables, *optimizer.inner_optimizer.variables]
    return seen, [whole(variable.value) for variable in kept]


def distributed(kind, name, how, bad):
    if kind == "DistributedDataParallel":
        model = keras_module()
        call = DistributedDataParallel(model)
    else:
        model = call = keras.layers.TorchModuleWrapper(fully_shard(module()))
    rank = dist.get_rank()
    optimizer = LossScaleOptimizer(OPTIMIZERS[name](), policy=POLICY)
    inputs = INPUTS[:, 2 * rank : 2 * rank + 2]
    return steps(call, model.trainable_variables, optimizer, inputs, how, rank == bad)


@functools.cache
def single(kind, name):
    """The same training on all inputs, in this process alone."""
    is_keras = kind == "DistributedDataParallel"
    model = keras_module() if is_keras else keras.layers.TorchModuleWrapper(module())
    optimizer = LossScaleOptimizer(OPTIMIZERS[name](), policy=POLICY)
    return steps(model, model.trainable_variables, optimizer, INPUTS, "loss")


@pytest.mark.parametrize("bad", range(WORLD))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("DistributedDataParallel", "loss"),
        ("DistributedDataParallel", "minimize"),
        ("fully_shard", "loss"),
        ("fully_shard", "part"),
        ("fully_shard", "minimize"),
    ],
)
def test_all_skip_what_one_finds_and_end_as_one_process(ranks, kind, name, how, bad):
    expected, values = single(kind, name)
    assert [scale for scale, *_ in expected] == [1024.0] * 3 + [512.0] * 2 + [1024.0]
    for seen, found in ranks(WORLD).run(distributed, kind, name, how, bad):
        assert seen == expected
        for value, other in zip(values, found, strict=True):
            assert np.allclose(value, other, rtol=1e-4, atol=1e-6)


def fitted():
    rank = dist.get_rank()
    model = keras.Sequential([keras.layers.TorchModuleWrapper(fully_shard(module()))])
    adam = keras.optimizers.Adam(0.1)
    optimizer = LossScaleOptimizer(adam, initial_scale=1024.0, dynamic_growth_steps=2)
    model.compile(optimizer, "mse")
    inputs = INPUTS[:, rank].copy()
    if rank == 1:
        inputs[2] = np.inf
    model.fit(inputs, np.ones((len(inputs), 1)), batch_size=1, shuffle=False, verbose=0)
    momentum = adam._momentums[0].value
    counts = int(optimizer.iterations), int(optimizer.dynamic_counter)
    weights = [whole(v.value).tolist() for v in model.trainable_variables]
    return float(optimizer.loss_scale), counts, tuple(momentum.to_local().shape), weights


def test_fit_steps_the_parts_of_each_process(ranks):
    first, second = ranks(WORLD).run(fitted)
    assert first[0] == 2048.0
    assert first[1] == (5, 1)
    assert [first[2], second[2]] == [(2, 4), (1, 4)]
    assert first[3] == second[3]
    assert np.isfinite(first[3][0]).all()


def different():
    model = keras.layers.TorchModuleWrapper(fully_shard(module()))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    variables = model.trainable_variables
    optimizer.build(variables)
    if dist.get_rank() == 1:
        optimizer.dynamic_scale.assign(64.0)
    before = [whole(variable.value) for variable in variables]
    grads = [torch.ones_like(variable.value) for variable in variables]
    with pytest.raises(ScaleMismatchError) as raised:
        optimizer.apply(grads, variables)
    after = [whole(variable.value) for variable in variables]
    return str(raised.value), all(map(np.array_equal, before, after)), float(optimizer.loss_scale)


def test_processes_with_different_scales_all_raise(ranks):
    first, second = ranks(WORLD).run(different)
    assert "scale is 64 on one and 1024 on another" in first[0]
    assert first[:2] == second[:2]
    assert first[1]
    assert (first[2], second[2]) == (1024.0, 64.0)


def flattened():
    model = keras.layers.TorchModuleWrapper(FullyShardedDataParallel(module(), device_id="cpu"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    variables = model.trainable_variables
    grads = [torch.ones_like(variable.value) for variable in variables]
    with pytest.raises(ParameterError, match=r"shard the module with .*fully_shard"):
        optimizer.apply(grads, variables)
    return int(optimizer.dynamic_counter)


def test_flattened_parameters_are_refused(ranks):
    assert ranks(WORLD).run(flattened) == [0, 0]
