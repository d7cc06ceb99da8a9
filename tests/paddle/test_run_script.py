"""Loops of Paddle that call ``minimize()``, as its high-level API does, are watched, too."""

import numpy as np
import paddle
import pytest

import gradscaler
from gradscaler.paddle import GradScaler
from tests.support.marked_lines import lines_marked_in

BATCHES = np.random.default_rng(0).standard_normal((8, 4, 3)).astype("float32")
BATCHES[5] = 0
LINE_OF = lines_marked_in(__file__)


class Rows(paddle.io.Dataset):
    def __getitem__(self, number):
        return BATCHES.reshape(-1, 3)[number], np.float32(0)

    def __len__(self):
        return BATCHES.shape[0] * BATCHES.shape[1]


def loss_of(outputs, _=None):
    return paddle.sqrt(outputs.square().mean())  # fails


def network():
    paddle.seed(0)
    model = paddle.nn.Linear(3, 1, bias_attr=False)
    return model, paddle.optimizer.Adam(1e-2, parameters=model.parameters())


def by_minimize():
    model, optimizer = network()
    for batch in BATCHES:
        loss = loss_of(model(paddle.to_tensor(batch)))
        loss.backward()
        optimizer.minimize(loss)
        model.clear_gradients()
    return model


def by_a_disabled_scaler():
    model, optimizer = network()
    scaler = GradScaler(enable=False)
    for batch in BATCHES:
        scaled = scaler.scale(loss_of(model(paddle.to_tensor(batch))))
        scaled.backward()
        scaler.minimize(optimizer, scaled)
        model.clear_gradients()
    return model


def by_fit():
    network_, optimizer = network()
    model = paddle.Model(network_)
    model.prepare(optimizer, loss_of)
    model.fit(Rows(), batch_size=4, epochs=1, verbose=0, shuffle=False)
    return network_


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # Paddle's fit
@pytest.mark.parametrize("train", [by_minimize, by_a_disabled_scaler, by_fit])
def test_the_first_bad_step_is_told_and_a_watched_one_names_its_line(train, tmp_path):
    plain = train().weight.numpy()
    for step, told in (
        (None, "step 6 was applied with"),
        (6, f"by the gradient of sqrt at {LINE_OF('fails')}"),
    ):
        with gradscaler.watch(tmp_path / str(step), step=step) as watch:
            watched = train().weight.numpy()
        assert told in watch.verdict.text
        np.testing.assert_array_equal(watched, plain)


def test_a_scaler_s_minimize_is_one_step(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        model, optimizer = network()
        scaler = GradScaler(init_loss_scaling=8.0)
        for batch in BATCHES[:4]:
            scaled = scaler.scale(model(paddle.to_tensor(batch)).square().mean())
            scaled.backward()
            scaler.minimize(optimizer, scaled)
            model.clear_gradients()
    assert "of 4 steps" in watch.verdict.text


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")  # Paddle's minimize
def test_a_static_graph_is_left_alone(tmp_path):
    paddle.enable_static()
    try:
        with (
            gradscaler.watch(tmp_path) as watch,
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        ):
            x = paddle.static.data("x", [4, 3], "float32")
            loss = paddle.nn.Linear(3, 1)(x).square().mean()
            paddle.optimizer.SGD(0.1).minimize(loss)
            executor = paddle.static.Executor()
            executor.run(paddle.static.default_startup_program())
            executor.run(feed={"x": BATCHES[0]}, fetch_list=[loss])
    finally:
        paddle.disable_static()
    assert watch.verdict is None
