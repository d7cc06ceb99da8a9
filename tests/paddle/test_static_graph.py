"""The static graph: enabled scaling is refused, and disabled scaling does what Paddle's does."""

import paddle
import pytest
from paddle.utils import unique_name

from gradscaler.paddle import GradScaler

REFUSED = r"static graph: use paddle\.amp\.GradScaler"


@pytest.fixture
def static():
    paddle.enable_static()
    try:
        with unique_name.guard():
            yield
    finally:
        paddle.disable_static()


def program(kind, dtype, level):
    """A program with a disabled scaler's calls: its operations, and what the calls return."""
    main = paddle.static.Program()
    with unique_name.guard(), paddle.static.program_guard(main, paddle.static.Program()):
        scaler = kind(enable=False)
        model = paddle.nn.Linear(2, 1)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        optimizer = paddle.static.amp.decorate(
            optimizer, level=level, init_loss_scaling=8.0, use_dynamic_loss_scaling=True
        )
        loss = model(paddle.static.data("x", [4, 2])).mean().astype(dtype)
        scaled = scaler.scale(loss)
        scaler.unscale_(optimizer)
        operators, pairs = scaler.minimize(optimizer, scaled)
        scaler.update()
        made = main.global_block().ops
        operations = [(op.name(), [str(value.type()) for value in op.results()]) for op in made]
        return operations, scaled.dtype, len(operators), len(pairs), scaler.state_dict()


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")  # Paddle's minimize
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_disabled_scaler_makes_the_program_that_paddle_s_makes(static, dtype, level):
    assert program(GradScaler, dtype, level) == program(paddle.amp.GradScaler, dtype, level)


def test_an_enabled_scaler_is_refused_with_the_way_out(static):
    with pytest.raises(NotImplementedError, match=REFUSED):
        GradScaler()


def test_a_loss_of_a_static_graph_is_refused_and_the_scaler_stays_as_it_is(scaler):
    before = scaler.state_dict()
    paddle.enable_static()
    try:
        with (
            paddle.static.program_guard(paddle.static.Program()),
            pytest.raises(NotImplementedError, match=REFUSED),
        ):
            scaler.scale(paddle.static.data("loss", []))
    finally:
        paddle.disable_static()
    assert scaler.state_dict() == before
    assert scaler.scale(paddle.ones([1])).item() == 1024.0


def scaled(scaler, loss):
    return scaler.scale(loss)


def test_a_loss_in_a_full_graph_is_refused_with_the_way_out(scaler):
    with pytest.raises(NotImplementedError, match=r"to_static\(full_graph=True\)"):
        paddle.jit.to_static(scaled, full_graph=True)(scaler, paddle.ones([1]))
