"""What a type checker says of a user's code."""

CODE = """
import paddle
from gradscaler import StepOutcome
from gradscaler.paddle import GradScaler

weight = paddle.zeros([3])
optimizer = paddle.optimizer.SGD(parameters=[weight])
scaler = GradScaler()
a: paddle.Tensor = scaler.scale(weight)
b: paddle.Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
c: StepOutcome = scaler.last_step(optimizer)
scaler.step(optimizer)
scaler.minimize(optimizer, a)
scaler.step(5)  # arg-type
scaler.unscale_(5)  # arg-type
scaler.minimize(5)  # arg-type
scaler.clip_grad_norm_(5, 1.0)  # arg-type
scaler.clip_grad_norm_(optimizer)  # call-arg
scaler.scale(5)  # arg-type
"""


def test_every_wrong_call_is_an_error_and_no_right_one(check_types):
    check_types(CODE)
