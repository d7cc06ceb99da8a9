"""Loops of TensorPlay under a watch: what is told of them, whose bits stay the same."""

import pickle

import numpy as np
import pytest
import tensorplay
from tensorplay import nn

import gradscaler
from gradscaler.diagnose import read_run
from gradscaler.tensorplay import GradScaler

STEPS = 6


def trained(make_scaler, repeats, scale=2.0**10):
    """The weights of a training in which a script may step beside its scaler, and those steps."""
    tensorplay.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = tensorplay.optim.SGD(model.parameters(), lr=1e-3)
    scaler = make_scaler("cpu", init_scale=scale)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tensorplay.ones(2, 4)).half().float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if repeats:
            optimizer.step()
    return [each.detach().numpy().tobytes() for each in model.parameters()]


@pytest.mark.parametrize("scale", [2.0**10, 2.0**24])
@pytest.mark.parametrize("make_scaler", [tensorplay.amp.GradScaler, GradScaler])
def test_a_step_beside_that_of_the_scaler_is_told(make_scaler, scale, tmp_path):
    native = trained(make_scaler, True, scale)
    with gradscaler.watch(tmp_path) as watch:
        assert trained(make_scaler, True, scale) == native
    assert np.isfinite(np.frombuffer(native[0], "float32")).all() == (scale < 2**24)
    assert watch.verdict.kind == "misuse"
    count = STEPS - 1  # as its own steps come after the scaler's latest one
    assert f"called {count} times beside step(optimizer) of the scaler" in watch.verdict.text


@pytest.mark.parametrize("scale", [2.0**10, 2.0**24])
@pytest.mark.parametrize("make_scaler", [tensorplay.amp.GradScaler, GradScaler])
def test_a_loop_with_a_scaler_alone_is_no_mistake(make_scaler, scale, tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        trained(make_scaler, False, scale)
    assert watch.verdict is None or "beside" not in watch.verdict.text


def skipping(steps=24):
    """The losses and scales of a training with TensorPlay's scaler; each third batch overflows."""
    tensorplay.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = tensorplay.optim.Adam(model.parameters(), lr=1e-3)
    scaler = tensorplay.amp.GradScaler("cpu", 2.0**8, growth_interval=2)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        norms = model(tensorplay.ones(2, 4) * float(step % 3 > 1)).sum() * 0.0
        loss = model(tensorplay.ones(2, 4)).mean() + (norms / norms if step % 3 == 1 else norms)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((repr(loss.item()), scaler.get_scale(), scaler.state_dict()))
    return str(seen), [each.detach().numpy().tobytes() for each in model.parameters()]


def test_steps_that_tensorplay_s_scaler_skips_are_told(tmp_path):
    expected = skipping()
    with gradscaler.watch(tmp_path):
        assert skipping() == expected
    (file,) = tmp_path.glob("*.jsonl")
    assert len(read_run(file).skipped) == 8


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_an_eps_that_is_0_in_float16_is_told_of_weights_that_explode(eps, tmp_path):
    tensorplay.manual_seed(0)
    x = np.random.RandomState(0).rand(640, 20).astype("float32")
    x[:, 15:] = 0  # these gradients are 0
    y = (x[:, :10].sum(1) > x[:, 10:].sum(1) + 2).astype("int64")
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)).half()
    optimizer = tensorplay.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    criterion = nn.CrossEntropyLoss()
    with gradscaler.watch(tmp_path) as watch:
        for start in range(0, 640, 32):
            batch, target = x[start : start + 32], tensorplay.tensor(y[start : start + 32])
            loss = criterion(model(tensorplay.tensor(batch).half()).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    is_told = "divides by an eps of 1e-08, which is 0 in the float16" in watch.verdict.text
    assert is_told == (eps < 1e-7)


def test_steps_beside_tensorplay_s_scaler_are_told(tmp_path):
    tensorplay.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = tensorplay.optim.SGD(model.parameters(), lr=1e-6)
    with gradscaler.watch(tmp_path) as watch:
        scaler = tensorplay.amp.GradScaler("cpu")
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(model(tensorplay.ones(2, 4)).mean()).backward()
            optimizer.step()
    assert "no step(optimizer) of the scaler came" in watch.verdict.text


def test_tensorplay_s_scaler_is_its_own_before_a_watch_and_after(tmp_path):
    own, ours = tensorplay.amp.GradScaler, GradScaler
    with gradscaler.watch(tmp_path):
        made = own("cpu", 2.0**3, 4.0, 0.25, 7)
        assert isinstance(made, ours)
        assert made.state_dict() == ours("cpu", 2.0**3, 4.0, 0.25, 7).state_dict()
        with pytest.raises(AssertionError, match="growth factor"):
            own("cpu", growth_factor=0.5)
        with pytest.warns(UserWarning, match="CUDA is not available") as warned:
            assert not own().is_enabled()
        assert warned[0].filename == __file__
        assert type(ours("cpu")) is ours
    made = own("cpu", init_scale=2.0**3)
    assert type(made) is own
    assert made.get_scale() == 8


def test_a_pickle_of_a_watched_scaler_names_the_public_class(tmp_path):
    with gradscaler.watch(tmp_path):
        pickled = pickle.dumps(tensorplay.amp.GradScaler("cpu", init_scale=8.0))
    loaded = pickle.loads(pickled)
    assert type(loaded) is GradScaler
    assert loaded.get_scale() == 8.0


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_loss_that_stays_where_a_guess_is_names_the_number_of_classes(factor, tmp_path):
    tensorplay.manual_seed(0)
    random = np.random.default_rng(0)
    model = nn.Linear(4, 6)
    optimizer = tensorplay.optim.SGD(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    with gradscaler.watch(tmp_path) as watch:
        for _ in range(120):
            x = tensorplay.tensor(0.1 * random.normal(size=(64, 4)).astype("float32"))
            optimizer.zero_grad()
            loss = criterion(model(x), tensorplay.tensor(random.integers(0, 6, size=64)))
            (factor * loss).backward()
            optimizer.step()
    said = watch.verdict.text
    assert ("it stays at 1.79, that of a guess among 6 classes" in said) == (factor == 1)
    assert factor == 1 or "look at the learning rate, clipping, inputs and targets" in said
