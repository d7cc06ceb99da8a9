"""A small regression, for tests that compare trainings."""

import numpy as np

from tests.support.eager import library
from tests.support.eager.base import normal


class Regression:
    """Batches of inputs and targets, a model, and an optimizer of its parameters.

    Attributes:
        before: a layer in front of the model.
        scales: the loss scale of each backward pass.

    Args:
        make_optimizer: makes the optimizer, given the parameters.
        half: whether the backward pass casts to float16, so that gradients may overflow.
        batches: the number of batches.
    """

    def __init__(self, make_optimizer=library.optimizers["SGD"], half=False, batches=3):
        self.model = library.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.parameters)
        self.half = half
        self.batches = list(zip(*normal(2, (batches, 8, 4), (batches, 8, 1)), strict=True))
        self.before = lambda inputs: inputs
        self.scales = []

    def loss(self, batch):
        """The sum of the squared errors of a batch, by its number."""
        inputs, targets = map(library.tensor, self.batches[batch])
        outputs = self.model(self.before(inputs))
        if self.half:
            outputs = library.through_float16(outputs)
        return ((outputs - targets) ** 2).sum()

    def backward(self, scaler, batch, overflows=False):
        loss = self.loss(batch)
        scaled = scaler.scale(loss)
        self.scales.append(scaled.item() / loss.item())
        (scaled * np.inf if overflows else scaled).backward()

    def step_without_a_scaler(self, before_the_step=lambda: None):
        """Step on the gradients of all batches, as every scaler must."""
        library.clear_gradients(self.optimizer)
        for batch in range(len(self.batches)):
            self.loss(batch).backward()
        before_the_step()
        self.optimizer.step()

    def gradients(self):
        return [library.numpy(parameter.grad) for parameter in self.parameters]
