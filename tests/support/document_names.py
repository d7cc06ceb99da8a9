"""The names that the documents' examples take for granted, by framework."""

import importlib
from contextlib import contextmanager
from types import SimpleNamespace


@contextmanager
def kept_settings(framework):
    """Restore the settings that an example changes for the whole process."""
    if framework == "keras":
        config = importlib.import_module("keras").config
        policy = config.dtype_policy()
        yield
        config.set_dtype_policy(policy)
    elif framework == "tf_keras":
        precision = importlib.import_module("tf_keras").mixed_precision
        policy = precision.global_policy()
        yield
        precision.set_global_policy(policy)
    else:
        yield


def on_torch():
    """A model that has trained for one step, and the other names of a loop."""
    import torch

    from gradscaler.torch import GradScaler

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.ones(16, 4), torch.zeros(16, 1)
    scaler = GradScaler()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    return {
        "torch": torch,
        "GradScaler": GradScaler,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "scaler": scaler,
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)] * 3,
        "loss_function": torch.nn.functional.mse_loss,
        "loss": loss,
        "torch_scaler": GradScaler(init_scale=2.0**10),
        "paddle_scaler": GradScaler(),  # a scaler loads any format
        "saved": scaler.state_dict(),
        "self": SimpleNamespace(output=model[0]),
        "x": inputs.half(),
        "trainer": SimpleNamespace(run=lambda: None),
    }


def on_keras():
    """A model, a batch, and the names around the JAX step in docs/differences/keras.md."""
    import keras
    import numpy as np

    from gradscaler.keras import LossScaleOptimizer

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    of_jax = {"jax": importlib.import_module("jax")} if keras.backend.backend() == "jax" else {}
    return of_jax | {
        "keras": keras,
        "optimizer": optimizer,
        "loss": lambda trainable, batch: (trainable[0] * batch).mean(),
        "model": keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        "inputs": np.ones((16, 4), np.float32),
        "targets": np.zeros((16, 1), np.float32),
    }


def on_jax():
    """Parameters in float32, a loss and a batch."""
    import jax
    import jax.numpy as jnp

    def loss_fn(params, inputs, targets):
        outputs = inputs.astype(params["w"].dtype) @ params["w"] + params["b"]
        return jnp.mean((outputs.astype(jnp.float32) - targets) ** 2)

    return {
        "jax": jax,
        "params": {"w": jnp.full((4, 1), 0.1), "b": jnp.zeros(1)},
        "loss_fn": loss_fn,
        "inputs": jnp.ones((16, 4)),
        "targets": jnp.zeros((16, 1)),
    }


def on_tf_keras():
    """A model and a batch."""
    import numpy as np
    import tf_keras

    return {
        "tf_keras": tf_keras,
        "model": tf_keras.Sequential([tf_keras.layers.Dense(1)]),
        "inputs": np.ones((16, 4), np.float32),
        "targets": np.zeros((16, 1), np.float32),
    }


def on_paddle():
    """An optimizer, and the loss of its model."""
    import paddle

    model = paddle.nn.Linear(4, 1)
    return {
        "optimizer": paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        "loss": model(paddle.ones([16, 4])).square().mean(),
    }


def on_tensorplay():
    """An optimizer, and the loss of its model."""
    import tensorplay

    model = tensorplay.nn.Linear(4, 1)
    return {
        "optimizer": tensorplay.optim.SGD(model.parameters(), lr=0.1),
        "loss": model(tensorplay.ones(16, 4)).pow(2).mean(),
    }


def on_mindspore():
    """A network with its loss function and optimizer, and batches."""
    import numpy as np
    from mindspore import nn
    from mindspore.dataset import NumpySlicesDataset

    network = nn.Dense(4, 1)
    batch = np.ones((16, 4), np.float32), np.zeros((16, 1), np.float32)
    return {
        "network": network,
        "loss_fn": nn.MSELoss(),
        "optimizer": nn.SGD(network.trainable_params(), 0.1),
        "data": NumpySlicesDataset(batch, ["inputs", "targets"]).batch(8),
    }
