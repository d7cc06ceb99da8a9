"""What a user sees of an overflow: a logging record, and nothing on stdout."""

import logging
import warnings

import paddle
import pytest

from gradscaler.paddle import GradScaler


@pytest.fixture
def overflow(make, backward, overflowed):
    """Takes a scaler through an iteration that overflows."""
    parameters = make([2, 3], [4])
    optimizer = paddle.optimizer.SGD(parameters=parameters)

    def once(scaler, minimize=False):
        optimizer.clear_grad()
        loss = backward(scaler, parameters, overflowed)
        if minimize:
            scaler.minimize(optimizer, loss)
        else:
            scaler.step(optimizer)
            scaler.update()

    return once


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_an_overflow_prints_nothing_and_warns_of_nothing(minimize, overflow, capfd):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overflow(scaler, minimize)
    assert capfd.readouterr().out == ""
    assert scaler.state_dict()["scale"] == [512.0]


def test_paddle_s_own_prints(native, overflow):
    overflow(native(init_loss_scaling=1024.0))
    assert native.printed.getvalue().startswith("Found inf or nan")


def test_a_backoff_is_logged_with_both_scales(overflow, caplog):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    with caplog.at_level(logging.INFO, "gradscaler"):
        overflow(scaler)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gradscaler.paddle.scaler", logging.INFO)
    assert "1024" in record.getMessage()
    assert "512" in record.getMessage()


def test_an_overflow_that_hysteresis_tolerates_logs_no_backoff(overflow, caplog):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=2)
    with caplog.at_level(logging.INFO, "gradscaler"):
        overflow(scaler)
        assert caplog.records == []
        overflow(scaler)
    assert len(caplog.records) == 1


def test_a_finite_step_logs_nothing(caplog, make, backward, finite):
    scaler = GradScaler(incr_every_n_steps=1)
    parameters = make([2, 3], [4])
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    with caplog.at_level(logging.DEBUG, "gradscaler"):
        backward(scaler, parameters, finite)
        scaler.step(optimizer)
        scaler.update()
    assert caplog.records == []
