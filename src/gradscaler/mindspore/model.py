"""``mindspore.Model``, with loss scaling on the CPU too."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import amp
from mindspore.train import Callback

from gradscaler.mindspore.managers import DynamicLossScaleManager
from gradscaler.mindspore.train import own_update_cell, with_loss_scaling


class Model(mindspore.Model):  # type: ignore[misc] # untyped base
    """Trains, evaluates and predicts: a drop-in for ``mindspore.Model``, on the CPU too.

    On the CPU, MindSpore's own refuses a ``loss_scale_manager`` that skips steps.

    A dynamic manager follows the train step: after each step and after the training, its
    ``loss_scale`` is the scale of the step, also where a checkpoint was loaded. To set the scale,
    call ``model.train_network.set_sense_scale``.

    Args:
        network: the network, or with ``loss_fn`` None a cell that returns the loss.
        loss_fn: a cell that computes the loss from the network's output and a label.
        optimizer: updates the network's parameters.
        metrics: names of metrics in a set, or metrics in a dict, for :meth:`eval`.
        eval_network: evaluates, in place of ``network`` and ``loss_fn``.
        eval_indexes: where the outputs of ``eval_network`` hold the loss, predictions and labels.
        amp_level: the mixed precision: "O0", "O1", "O2", "O3" or "auto". "O2" scales the loss by a
            ``DynamicLossScaleManager()`` if ``loss_scale_manager`` is left out.
        boost_level: of ``mindspore.boost``: "O0", "O1" or "O2"; on the CPU loss scaling that skips
            steps takes only "O0".
        kwargs: ``loss_scale_manager``, ``keep_batchnorm_fp32`` and ``boost_config_dict``, as
            MindSpore's own has them.

    Raises:
        ValueError, TypeError: as MindSpore's own; or on the CPU, steps would be skipped with
            ``boost_level``, or with MindSpore's own accumulation of gradients.

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

    _loss_scale_manager: Any

    def _build_train_network(self) -> Any:
        if self._amp_level == "O2" and not self._loss_scale_manager_set:
            self._process_amp_args({"loss_scale_manager": DynamicLossScaleManager()})
        manager = self._loss_scale_manager
        update_cell = None if self._optimizer is None else own_update_cell(manager)
        if update_cell is None:
            return super()._build_train_network()
        self._loss_scale_manager = None
        step = super()._build_train_network()
        self._loss_scale_manager = manager
        return with_loss_scaling(step, manager, update_cell)

    def _transform_callbacks(self, callbacks: Any) -> Any:
        callbacks = super()._transform_callbacks(callbacks)
        if isinstance(self._loss_scale_manager, amp.DynamicLossScaleManager):
            callbacks.insert(0, _Follow(self._loss_scale_manager, self._train_network))
        return callbacks


class _Follow(Callback):  # type: ignore[misc] # untyped base
    """Gives a manager the loss scale of its train step.

    ``Model`` tells the manager of each overflow, but not of what a checkpoint brought back.
    """

    def __init__(self, manager: Any, step: Any) -> None:
        super().__init__()
        self._manager, self._step = manager, step
        # The public attribute of ours has bounds, which a scale set in the step need not respect.
        self._is_ours = isinstance(manager, DynamicLossScaleManager)
        self._name = "_loss_scale" if self._is_ours else "loss_scale"

    def __enter__(self) -> _Follow:
        if self._is_ours:
            self._manager._is_following = True
        return self

    def on_train_step_end(self, run_context: Any) -> None:
        self._follow()

    def __exit__(self, *error: object) -> None:
        """At the end, also of a training that raised: a callback may restore the best weights."""
        self._follow()
        if self._is_ours:
            self._manager._is_following = False

    def _follow(self) -> None:
        scale = self._step.scale_sense.asnumpy().item()
        if scale != self._manager.get_loss_scale():
            setattr(self._manager, self._name, scale)
