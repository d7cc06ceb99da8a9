"""A user sees an overflow as a logging record, and nothing on stdout."""

import logging
import subprocess
import sys
import warnings

import pytest

from gradscaler.paddle import GradScaler
from tests.support.eager import library


@pytest.fixture
def log(caplog):
    with caplog.at_level(logging.DEBUG, "gradscaler"):
        yield caplog


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_an_overflow_prints_nothing_and_warns_of_nothing(minimize, parameters, overflowed, capfd):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    optimizer = library.sgd(parameters)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = library.backward(scaler, parameters, overflowed)
        if minimize:
            scaler.minimize(optimizer, loss)
        else:
            scaler.step(optimizer)
            scaler.update()
    assert capfd.readouterr().out == ""
    assert scaler.state_dict()["scale"] == [512.0]


SCRIPT = """
import logging
import paddle
from gradscaler.diagnose import Monitor
from gradscaler.paddle import GradScaler

parameter = paddle.create_parameter([1], "float32")
scaler = GradScaler(decr_every_n_nan_or_inf=1)
monitor = Monitor(scaler)
scaler.scale((parameter * float("inf")).sum()).backward()
scaler.step(paddle.optimizer.SGD(parameters=[parameter]))
scaler.update()
assert scaler.get_scale() == 2.0**14
logging.getLogger("another").info("a record at level INFO")
"""


def test_a_skip_prints_nothing_though_paddle_prints_every_record_at_level_info():
    """Importing it sets up the root logger."""
    script = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "a record at level INFO" in result.stderr
    assert "loss scale" not in result.stdout + result.stderr  # neither the scaler nor its monitor


def test_paddle_s_own_prints(native):
    library.train(native(), "x")
    assert native.printed.getvalue().startswith("Found inf or nan")


def test_a_backoff_is_logged_with_both_scales(log):
    library.train(GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1), "x")
    (record,) = log.records
    assert (record.name, record.levelno) == ("gradscaler.paddle.scaler", logging.DEBUG)
    assert "1024" in record.getMessage()
    assert "512" in record.getMessage()


def test_an_overflow_that_hysteresis_tolerates_logs_no_backoff(log):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=2)
    library.train(scaler, "x")
    assert log.records == []
    library.train(scaler, "x")
    assert len(log.records) == 1


def test_a_finite_step_logs_nothing(log):
    assert library.train(GradScaler(incr_every_n_steps=1), "o") == [2.0**16]
    assert log.records == []
