"""A drop-in for ``mindspore.Model`` that also scales losses on the CPU."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import amp, nn
from mindspore.train import Callback

from gradscaler.mindspore.managers import DynamicLossScaleManager
from gradscaler.mindspore.train import finished, own_update_cell


class Model(mindspore.Model):  # type: ignore[misc] # untyped base
    """Trains, evaluates and predicts: a drop-in for ``mindspore.Model``, also on the CPU.

    On the CPU, MindSpore's own Model refuses a ``loss_scale_manager`` that skips steps.

    After each step and after the training, the ``loss_scale`` of a dynamic manager is set to the
    scale of the train step, which a checkpoint may have changed. To set the scale yourself, call
    ``model.train_network.set_sense_scale``.

    Args:
        network: the network; if ``loss_fn`` is None, a cell that returns the loss.
        loss_fn: a cell that computes the loss from the network's output and a label.
        optimizer: the optimizer of the network's parameters.
        metrics: a set of names of metrics, or a dict of metrics, for :meth:`eval`.
        eval_network: the network for :meth:`eval`, in place of ``network`` and ``loss_fn``.
        eval_indexes: the positions of the loss, predictions and labels in the outputs of
            ``eval_network``.
        amp_level: the level of mixed precision: "O0", "O1", "O2", "O3" or "auto". "O2" scales the
            loss by a ``DynamicLossScaleManager()`` if ``loss_scale_manager`` is left out.
        boost_level: the level of ``mindspore.boost``: "O0", "O1" or "O2". On the CPU, loss scaling
            that skips steps requires "O0".
        kwargs: ``loss_scale_manager``, ``keep_batchnorm_fp32`` and ``boost_config_dict``, as in
            MindSpore's own Model.

    Raises:
        ValueError, TypeError: the errors of MindSpore's own Model. Also ValueError on the CPU, if a
            manager that skips steps is combined with a ``boost_level`` above "O0" or with
            MindSpore's accumulation of gradients.

    >>> import numpy as np
    >>> from mindspore import nn
    >>> from mindspore.dataset import NumpySlicesDataset
    >>> network = nn.Dense(2, 1, weight_init="ones")
    >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    >>> manager = DynamicLossScaleManager(init_loss_scale=1024, scale_window=2)
    >>> model = Model(network, nn.MSELoss(), optimizer, loss_scale_manager=manager)
    >>> data = np.ones((8, 2), np.float32), np.zeros((8, 1), np.float32)
    >>> model.train(1, NumpySlicesDataset(data).batch(2))
    >>> manager.get_loss_scale()
    4096.0
    """

    _loss_scale_manager: amp.LossScaleManager | None

    def _build_train_network(self) -> nn.Cell:
        if self._amp_level == "O2" and not self._loss_scale_manager_set:
            self._process_amp_args({"loss_scale_manager": DynamicLossScaleManager()})
        manager = self._loss_scale_manager
        if self._optimizer is None:
            return super()._build_train_network()
        update_cell = own_update_cell(manager)
        if update_cell is not None:
            self._loss_scale_manager = None
        step = super()._build_train_network()
        self._loss_scale_manager = manager
        return finished(step, self._optimizer, manager, update_cell)

    def _transform_callbacks(self, callbacks: list[Callback]) -> list[Callback]:
        callbacks = super()._transform_callbacks(callbacks)
        if isinstance(self._loss_scale_manager, amp.DynamicLossScaleManager):
            callbacks.insert(0, _Follow(self._loss_scale_manager, self._train_network))
        return callbacks


class _Follow(Callback):  # type: ignore[misc] # untyped base
    """Sets a manager's loss scale to that of its train step.

    ``Model`` tells the manager of each overflow, but not of a scale that a checkpoint restored.
    """

    def __init__(self, manager: amp.LossScaleManager, step: nn.Cell) -> None:
        super().__init__()
        self._manager, self._step = manager, step
        # The public attribute of our manager checks bounds, which the step's scale may exceed.
        self._is_ours = isinstance(manager, DynamicLossScaleManager)
        self._name = "_loss_scale" if self._is_ours else "loss_scale"

    def __enter__(self) -> _Follow:
        if self._is_ours:
            self._manager._is_following = True
        return self

    def on_train_step_end(self, run_context: Any) -> None:
        self._follow()

    def __exit__(self, *error: object) -> None:
        """Set the scale at the end, when a callback may have restored the best weights."""
        self._follow()
        if self._is_ours:
            self._manager._is_following = False

    def _follow(self) -> None:
        scale = self._step.scale_sense.asnumpy().item()
        if scale != self._manager.get_loss_scale():
            setattr(self._manager, self._name, scale)
