"""Semi-automatic parallelism: tensors on a mesh of two processes, one of whose shards overflows."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from gradscaler.paddle import GradScaler

INF = float("inf")
random = np.random.RandomState(0)
WEIGHT, BIAS = random.normal(size=(4, 2)).astype("float32"), np.ones(2, "float32")
INPUTS, TARGETS = random.normal(size=(8, 4)), random.normal(size=(8, 2))


def train(wrapped, clip, norm_type, bad, value, distributed=True):
    """Four steps; in the second, an element overflows that rank ``bad`` holds."""

    def place(tensor, shard=False):
        if not distributed:
            return paddle.to_tensor(tensor)
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        return dist.shard_tensor(tensor, mesh, [dist.Shard(0) if shard else dist.Replicate()])

    layer = paddle.nn.Linear(4, 2)
    layer.weight.set_value(WEIGHT)
    layer.bias.set_value(BIAS)
    if distributed:
        layer.weight, layer.bias = place(layer.weight, shard=True), place(layer.bias)
    inputs, targets = place(INPUTS.astype("float32")), place(TARGETS.astype("float32"))
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    scaler = GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1)
    if distributed:
        optimizer = dist.shard_optimizer(optimizer)
        if wrapped:
            scaler = dist.shard_scaler(scaler)
    factors = np.ones([4, 2], "float32")
    factors[2 * bad, 1] = value
    overflowing = place(factors, shard=True)
    step = 0
    layer.weight.register_hook(lambda grad: grad * overflowing if step == 1 else grad.clone())
    results = []
    for step in range(4):  # noqa: B007 # the hook reads it
        scaler.scale(((layer(inputs) - targets) ** 2).mean()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 0.5, norm_type).item() if clip else 0.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        results.append((scaler.last_step(optimizer).reason, scaler.state_dict(), norm))
    weight = layer.weight
    if distributed:
        weight = dist.reshard(weight, weight.process_mesh, [dist.Replicate()])
    return results, weight.numpy(), layer.bias.numpy()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [INF, float("nan")], ids=str)
@pytest.mark.parametrize(
    ("clip", "norm_type"), [(False, 2.0), *((True, p) for p in (2.0, 3.0, 0.0, INF))]
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "shard_scaler"])
def test_a_mesh_trains_as_one_process_does(ranks, wrapped, clip, norm_type, bad, value):
    args = wrapped, clip, norm_type, bad, value
    expected, weight, bias = train(*args, distributed=False)
    assert [reason for reason, *_ in expected] == ["finite", "overflow", "finite", "finite"]
    for results, *parameters in ranks(2).run(train, *args):
        for (reason, state, norm), (one_reason, one_state, one_norm) in zip(
            results, expected, strict=True
        ):
            assert (reason, state) == (one_reason, one_state)
            if reason == "finite":
                assert norm == pytest.approx(one_norm, rel=1e-5)
            elif clip and norm_type:  # the 0-norm counts elements that are not 0
                assert not np.isfinite(norm)
        for ours, one in zip(parameters, (weight, bias), strict=True):
            np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-6)
