"""Loops of MindSpore that fail in step 13, by a cause each; prints digests of the weights.

What Dropout draws after them is in the digests, too.
"""

import hashlib

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset

mindspore.device_context.cpu.op_tuning.threads_num(1)  # how many it takes else depends on time
CASES = ["healthy", "root", "logarithm", "batch", "model"]


class Net(nn.Cell):
    """A perceptron."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Dense(4, 8), nn.Dropout(p=0.5), nn.Dense(8, 1)

    def construct(self, x):
        return self.last(self.drop(ops.tanh(self.first(x))))


class WithLoss(nn.Cell):
    """A model with its loss."""

    def __init__(self, net, case):
        super().__init__()
        self.net, self.case = net, case

    def construct(self, x):
        outputs = self.net(x)
        loss = (outputs * outputs).mean()
        if self.case in ("root", "model"):
            return loss + ops.sqrt((((outputs - outputs[0]) * x.sum()) ** 2).sum())
        if self.case == "logarithm":
            print("forward")
            return loss - ops.log(x.abs().sum() + 0 * outputs.sum())
        return loss


def train(case):
    mindspore.set_seed(0)
    net = Net()
    loss_of = WithLoss(net, case).set_train()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    data = np.random.default_rng(0).standard_normal((24, 16, 4)).astype("float32")
    if case == "batch":
        data[12] = np.where(data[12] > 2, np.nan, data[12])
    elif case != "healthy":
        data[12] = 0
    if case == "model":
        model = mindspore.train.Model(loss_of, optimizer=optimizer)
        batches = GeneratorDataset([(each,) for each in data], ["x"], shuffle=False)
        model.train(1, batches, dataset_sink_mode=False)
    else:
        take = mindspore.value_and_grad(loss_of, None, optimizer.parameters)
        for batch in data:
            _, gradients = take(Tensor(batch))
            optimizer(gradients)
    drawn = net.drop(mindspore.ops.ones((4, 8)))
    return b"".join(each.asnumpy().tobytes() for each in (*optimizer.parameters, drawn))


for each in CASES:
    print(each, hashlib.sha256(train(each)).hexdigest())
