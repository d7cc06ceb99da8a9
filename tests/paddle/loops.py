"""Loops of Paddle that fail in step 13, by a cause each; prints digests of weights."""

import hashlib

import numpy as np
import paddle

import gradscaler.paddle

CASES = ["healthy", "root", "logarithm", "batch", "scaled"]


class Net(paddle.nn.Layer):
    """A perceptron."""

    def __init__(self):
        super().__init__()
        self.first, self.last = paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(paddle.tanh(self.first(x)))


def loss_of(outputs, x, case):
    loss = (outputs * outputs).mean()
    if case in ("root", "scaled"):
        return loss + paddle.sqrt((((outputs - outputs[0]) * x.sum()) ** 2).sum())
    if case == "logarithm":
        return loss - paddle.log(x.abs().sum() + 0 * outputs.sum())
    return loss


def train(case):
    paddle.seed(0)
    net = Net()
    optimizer = paddle.optimizer.Adam(1e-2, parameters=net.parameters())
    scaler = gradscaler.paddle.GradScaler(enable=case == "scaled")
    data = np.random.default_rng(0).standard_normal((24, 16, 4)).astype("float32")
    for step, batch in enumerate(data):
        if step == 12 and case != "healthy":
            batch = batch * 0 if case != "batch" else np.where(batch > 2, np.nan, batch)
        x = paddle.to_tensor(batch)
        scaler.scale(loss_of(net(x), x, case)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    return b"".join(p.numpy().tobytes() for p in net.parameters())


for each in CASES:
    print(each, hashlib.sha256(train(each)).hexdigest())
