"""One worker of test_data_parallel.py, in a file because msrun starts files."""

import json
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_rank, init

import gradscaler.mindspore as ours
from gradscaler import AmaxScale

WORLD = 2
INPUTS = np.random.default_rng(0).standard_normal((6, 2 * WORLD, 3)).astype(np.float32)
BAD = {1: 0, 3: 1}  # the step: the worker whose gradients overflow
MODES = {"pynative": mindspore.PYNATIVE_MODE, "graph": mindspore.GRAPH_MODE}


class Squares(nn.Cell):
    """The mean square of ``x @ weight``."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((3, 2)), mindspore.float32), name="weight")

    def construct(self, x):
        return (ops.matmul(x, self.weight) ** 2).mean()


def make_step(sense=None):
    network = Squares()
    optimizer = nn.Adam(network.trainable_params(), learning_rate=0.1)
    sense = sense or ours.DynamicLossScaleUpdateCell(1024, 2, 2)
    return ours.TrainOneStepWithLossScaleCell(network, optimizer, sense).set_train()


def train(rank):
    """Whether each step overflowed, and the scale, the counter and the weights after it.

    Args:
        rank: of the worker, which trains on its part of the inputs; None trains on all.
    """
    step = make_step()
    sense, optimizer, network = step.loss_scaling_manager, step.optimizer, step.network
    seen = []
    for index, batch in enumerate(INPUTS):
        inputs = batch.copy() if rank is None else batch[2 * rank : 2 * rank + 2].copy()
        if index in BAD and rank in (None, BAD[index]):
            inputs[0, 0] = np.inf
        _, overflow, _ = step(Tensor(inputs))
        counter = sense.cur_iter - sense.last_overflow_iter
        values = (overflow, step.scale_sense, counter, optimizer.global_step, network.weight)
        seen.append([value.asnumpy().tolist() for value in values])
    return seen


def flags(rank):
    """Whether a gradient that only one worker has overflows: by that worker, and without one."""
    step = make_step()
    return [
        bool(step.get_overflow_status(None, (Tensor(np.inf if rank == bad else 1.0),)))
        for bad in (*range(WORLD), None)
    ]


def largest(rank):
    """The largest gradient of all workers, of one that differs between them."""
    step = make_step(ours.DynamicLossScaleUpdateCell(policy=AmaxScale()))
    return step.get_amax((Tensor([0.5, -1.0 - rank]),)).asnumpy().item()


if __name__ == "__main__":
    init()
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    results = {"flags": flags(get_rank()), "largest": largest(get_rank())}
    for name, mode in MODES.items():
        mindspore.set_context(mode=mode)
        results[name] = train(get_rank())
    Path(sys.argv[1], f"{get_rank()}.json").write_text(json.dumps(results))
