"""Compiled loops of MindSpore that fail in step 13, by a cause each; prints digests of all states.

With each digest is how many graphs MindSpore compiled.
"""

import hashlib

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.graph import api

from gradscaler.mindspore import DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell

CASES = {
    "model": "healthy",
    "gradient": "root",
    "jit": "root",
    "cell": "logarithm",
    "scaled": "logarithm",
}
compiled = []
check = api._check_recompile


def counted(*arguments):
    """What MindSpore calls before it compiles a graph."""
    compiled.append(arguments[-1])
    return check(*arguments)


api._check_recompile = counted
mindspore.device_context.cpu.op_tuning.threads_num(1)  # how many it takes else depends on time


class Net(nn.Cell):
    """A perceptron with a loss, and random numbers."""

    def __init__(self, cause):
        super().__init__()
        self.first, self.drop, self.last = nn.Dense(4, 8), nn.Dropout(p=0.5), nn.Dense(8, 1)
        self.cause = cause

    def construct(self, x):
        outputs = self.last(self.drop(ops.tanh(self.first(x))))
        loss = (outputs * outputs).mean()
        if self.cause == "root":
            return loss + ops.sqrt((((outputs - outputs[0]) * x.sum()) ** 2).sum())
        if self.cause == "logarithm":
            return loss - ops.log(x.abs().sum() + 0 * outputs.sum())
        return loss


def step_of(how, net, optimizer):
    if how == "cell":
        return nn.TrainOneStepCell(net, optimizer)
    if how == "scaled":
        scale = DynamicLossScaleUpdateCell(2**12, 2, 1000)
        return TrainOneStepWithLossScaleCell(net, optimizer, scale)
    take = mindspore.value_and_grad(net, None, optimizer.parameters)

    def step(x):
        loss, gradients = take(x)
        optimizer(gradients)
        return loss

    return mindspore.jit(step) if how == "jit" else step


def train(how, cause):
    mode = mindspore.PYNATIVE_MODE if how == "jit" else mindspore.GRAPH_MODE
    mindspore.set_context(mode=mode)
    mindspore.set_seed(0)
    net = Net(cause).set_train()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    data = np.random.default_rng(0).standard_normal((24, 16, 4)).astype("float32")
    if cause != "healthy":
        data[12] = 0
    if how == "model":
        model = mindspore.train.Model(net, optimizer=optimizer)
        batches = GeneratorDataset([(each,) for each in data], ["x"], shuffle=False)
        model.train(1, batches, dataset_sink_mode=True)  # a CPU trains without it
    else:
        step = step_of(how, net, optimizer)
        for batch in data:
            step(Tensor(batch))
    return b"".join(each.asnumpy().tobytes() for each in optimizer.get_parameters())


for how, cause in CASES.items():
    compiled.clear()
    digest = hashlib.sha256(train(how, cause)).hexdigest()
    print(how, digest, len(compiled))
