"""Loops of Paddle or TensorPlay that fail in step 13, by a cause each; prints digests."""

import hashlib
import os
from importlib import import_module

import numpy as np

NAME = os.environ["GRADSCALER_FRAMEWORK"]
IS_PADDLE = NAME == "paddle"
fw, adapter = import_module(NAME), import_module(f"gradscaler.{NAME}")
CASES = ["healthy", "root", "logarithm", "batch", "rectified", "constant", "scaled"]


class Net(fw.nn.Module):
    """A perceptron; rectified, it makes 0 of NaN."""

    def __init__(self, is_rectified):
        super().__init__()
        self.first, self.last = fw.nn.Linear(4, 8), fw.nn.Linear(8, 1)
        self.is_rectified = is_rectified

    def forward(self, x):
        h = self.first(x)
        return self.last(fw.where(h > 0, h, fw.zeros_like(h)) if self.is_rectified else fw.tanh(h))


def loss_of(outputs, x, case):
    loss = (outputs * outputs).mean()
    if case in ("root", "scaled"):
        return loss + fw.sqrt((((outputs - outputs[0]) * x.sum()) ** 2).sum())
    if case == "logarithm":
        return loss - fw.log(x.abs().sum() + 0 * outputs.sum())
    if case == "constant":  # no parameter is behind it
        return loss - fw.log(x.abs().sum())
    return loss


def train(case):
    fw.manual_seed(0)
    net = Net(case == "rectified")
    if IS_PADDLE:
        optimizer = fw.optimizer.AdamW(1e-2, parameters=net.parameters())
        scaler = adapter.GradScaler(enable=case == "scaled")
    else:
        optimizer = fw.optim.Adam(net.parameters(), lr=1e-2)
        scaler = adapter.GradScaler(enabled=case == "scaled")
    data = np.random.default_rng(0).standard_normal((24, 16, 4)).astype("float32")
    for step, batch in enumerate(data):
        if step == 12 and case != "healthy":
            has_nan = case in ("batch", "rectified")
            batch = np.where(batch > 2, np.nan, batch) if has_nan else batch * 0
        x = fw.to_tensor(batch) if IS_PADDLE else fw.tensor(batch)
        scaler.scale(loss_of(net(x), x, case)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad() if IS_PADDLE else optimizer.zero_grad()
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())


for each in CASES:
    print(each, hashlib.sha256(train(each)).hexdigest())
