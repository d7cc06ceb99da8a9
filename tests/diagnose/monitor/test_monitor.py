"""The monitor of a training with PyTorch."""

import copy
import gc
import logging
import math
import pickle
import warnings
import weakref
from operator import attrgetter

import pytest

pytest.importorskip("torch")

import torch

from gradscaler import DynamicScale, FixedScale, NonfiniteGradient
from gradscaler.diagnose import Monitor, StuckError, StuckWarning, locate, read_run
from gradscaler.torch import GradScaler

# Their trainings are in float32, which is a finding of its own.
pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")

linear, seq = torch.nn.Linear, torch.nn.Sequential


class Training:
    """Steps of a small model; those that `steps` marks with "!" overflow."""

    def __init__(
        self,
        fused=False,
        every=4,
        model=None,
        scaler=None,
        scale=2.0**10,
        autocast=False,
        **options,
    ):
        torch.manual_seed(0)
        self.autocast = torch.autocast("cpu", torch.float16, enabled=autocast)
        self.model = model or seq(linear(4, 8), torch.nn.Tanh(), linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler = scaler or GradScaler(init_scale=scale)
        self.monitor = Monitor(self.scaler, self.model, every, **options)
        self.inputs = torch.randn(16, 4)

    def backward(self, finite=True):
        self.optimizer.zero_grad()
        with self.autocast:
            loss = self.model(self.inputs).float().square().mean()
        self.scaler.scale(loss).backward()
        if not finite:
            next(self.model.parameters()).grad[0, 0] = math.inf
        return loss

    def step(self, finite=True):
        loss = self.backward(finite)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def steps(self, flags):
        for flag in flags:
            self.step(flag == ".")
        return self

    def close(self):
        self.monitor.close()
        return self.monitor

    def stuck(self, flags, match=None):
        """The monitor, after these steps raise."""
        with pytest.raises(StuckError, match=match):
            self.steps(flags)
        return self.monitor


def one_step(path, parameters, loss, scale=1.0, model=None):
    """One step of SGD on these parameters: its entry in the history, and its sample."""
    scaler, optimizer = GradScaler(init_scale=scale), torch.optim.SGD(parameters)
    with Monitor(scaler, model, every=1, path=path) as monitor:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return monitor.history[0], read_run(path).samples[0]


# Its history.


@pytest.mark.parametrize("forensics", [0, 1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_the_history_agrees_with_the_scalers_own(fused, forensics):
    training = Training(fused, forensics=forensics).steps(".!..!!....!.")
    history, known = training.monitor.history, attrgetter("scale", "skipped", "nonfinite")
    assert [step.step for step in history] == list(range(1, 13))
    assert list(map(known, history)) == list(map(known, training.scaler.history))


def test_a_skip_is_inspected_by_name_and_logged_in_one_line(caplog):
    caplog.set_level(logging.DEBUG, "gradscaler")
    (found,) = Training().steps("..!.").scaler.history[2].nonfinite
    assert found == NonfiniteGradient("0.weight", (8, 4), "float32", 1, 0, found.largest_finite)
    (record,) = caplog.records
    assert record.name == "gradscaler"
    assert record.getMessage().startswith(
        "step 3 skipped at loss scale 1024: 0.weight (8x4 float32): 1 Inf, 0 NaN, largest of"
    )


def test_the_log_says_nothing_about_a_rest_that_is_not_there(caplog):
    caplog.set_level(logging.DEBUG, "gradscaler")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler(init_scale=4.0)
    with Monitor(scaler):
        scaler.scale((weight * math.nan).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    (record,) = caplog.records
    assert record.getMessage().endswith("group 0, parameter 0 (2 float32): 0 Inf, 2 NaN")


def test_without_a_model_parameters_go_by_their_place():
    training = Training()
    monitor = Monitor(training.scaler)
    training.step(finite=False)
    assert monitor.history[0].nonfinite[0].name == "group 0, parameter 0"


def test_two_optimizers_make_one_step_of_an_iteration(path):
    scaler = GradScaler(init_scale=4.0)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.0) for weight in weights]
    with Monitor(scaler, every=2, path=path) as monitor:
        for factors in ((1.0, 1.0), (1.0, math.inf)):
            for weight, factor in zip(weights, factors, strict=True):
                scaler.scale((weight * factor).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        first, second = monitor.history
    assert (first.skipped, second.skipped) == (False, True)
    assert [gradient.name for gradient in second.nonfinite] == ["optimizer 1, group 0, parameter 0"]
    (sample,) = read_run(path).samples
    assert len(sample.parameters) == 2


def test_an_iteration_without_gradients_is_not_a_step():
    training = Training(stuck_after=2, on_stuck="raise")
    training.step(finite=False)
    training.optimizer.zero_grad()
    training.scaler.step(training.optimizer)
    training.scaler.update(1024.0)
    assert len(training.monitor.history) == 1
    training.stuck("!")  # nor does it end the streak


def test_no_flag_is_read_before_a_sample_without_forensics(monkeypatch):
    monkeypatch.setattr(GradScaler._operations, "on_host", lambda tensor: False)
    training = Training(fused=True, forensics=0)
    for flags, waits in (("!!.", True), (".", False)):
        training.steps(flags)
        assert {callable(outcome._found_inf) for outcome in training.scaler.history} == {waits}


def test_a_loss_that_is_not_finite_counts_before_others():
    training = Training()
    training.scaler.scale(torch.tensor(math.inf))
    training.step(finite=False)
    assert training.monitor.history[0].loss == math.inf


@pytest.mark.parametrize("forensics", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_of_every_step_is_recorded(fused, forensics, path):
    training = Training(fused, forensics=forensics, path=path)
    losses = [training.step(flag == ".").item() for flag in ".!..!!....!."]
    training.close()
    assert [step.loss for step in training.monitor.history] == losses
    assert read_run(path).losses == dict(enumerate(losses, 1))


def test_a_loss_in_locate_belongs_to_no_step():
    training = Training()
    inputs = training.inputs
    for _ in range(2):
        training.inputs = inputs * math.nan
        locate(training.model, training.backward)
        training.inputs = inputs
        training.step(finite=False)
    assert all(math.isfinite(step.loss) for step in training.monitor.history)


def test_the_graph_of_a_loss_is_not_kept():
    training = Training(forensics=0)
    loss = weakref.ref(training.step())
    gc.collect()
    assert loss() is None


def test_the_loop_of_a_disabled_scaler_is_watched_as_one_without_a_scaler(path):
    training = Training(path=path, scaler=GradScaler(enabled=False)).steps("....")
    assert len(training.close().history) == 4
    run = read_run(path)
    assert run.scales == {}
    assert "scale" not in run.verdict.text


def test_a_closed_monitor_and_a_copy_of_the_scaler_observe_no_more(path):
    training = Training(path=path).steps("..")
    assert pickle.loads(pickle.dumps(training.scaler))._observers == []
    training.monitor.close()
    assert training.scaler._observers == []
    training.step()
    training.monitor.close()
    (sample,) = read_run(path).samples
    assert (sample.step, sample.shares) == (2, None)


# Samples.


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["step", "unscale_", "torch's", "clip_grad_norm_", "closure"])
def test_the_norm_is_that_of_the_unscaled_unclipped_gradients(call, fused, path):
    training = Training(fused, every=1, path=path)
    training.backward()
    grads = [parameter.grad.double().flatten() for parameter in training.model.parameters()]
    norm = float(torch.cat(grads).norm()) / 1024
    if call == "unscale_":
        training.scaler.unscale_(training.optimizer)
    elif call == "torch's":
        training.scaler.unscale_(training.optimizer)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), norm / 2)
    elif call == "clip_grad_norm_":
        training.scaler.clip_grad_norm_(training.optimizer, norm / 2)
    training.scaler.step(training.optimizer, *[training.backward] * (call == "closure"))
    training.scaler.update()
    (sample,) = read_run(path).samples
    assert sample.norm == pytest.approx(norm, rel=1e-5)
    assert sample.scale == 1024.0
    assert sample.loss == pytest.approx(training.backward().item(), rel=0.1)


def test_a_sample_at_a_scale_that_is_too_large_does_not_warn(path):
    Training(scale=2.0**40, every=1, path=path).step()
    (sample,) = read_run(path).samples
    assert sample.shares.overflow > 0.5


def test_shares_are_of_all_gradients_though_few_elements_are_measured(path):
    large, small = (torch.zeros(size, requires_grad=True) for size in (30_000, 10_000))
    loss = (large * 2.0**-30).sum() + small.sum()
    _, sample = one_step(path, [large, small], loss, scale=2.0)
    assert sample.shares.flushed == pytest.approx(0.75)
    assert sample.shares.normal == pytest.approx(0.25)
    first, counts = sample.histogram
    assert (first, counts[0], counts[-1]) == (-30, 30_000, 10_000)


def worst_of(factors, path):
    model = torch.nn.ParameterDict({name: torch.zeros(2) for name in (*factors, "partly")})
    loss = sum((model[name] * factor).sum() for name, factor in factors.items())
    loss = loss + model["partly"] @ torch.tensor([1.0, 2.0**-20])
    return one_step(path, model.parameters(), loss, model=model)[1].worst


def test_the_worst_parameters_are_named(path):
    factors = {"fine": 1.0, "zero": 0.0, "flushed": 2.0**-30, "subnormal": 2.0**-20}
    worst = worst_of(factors, path)
    assert set(worst[:3]) == {"zero", "flushed", "subnormal"}
    assert worst[3:] == ("partly", "fine")


def test_a_zero_gradient_counts_as_unused_while_no_other_is_small(path):
    factors = {"unused": 0.0, **{str(i): 1.0 for i in range(20)}}
    worst = worst_of(factors, path)
    assert worst[0] == "partly"
    assert "unused" not in worst


def test_a_sample_of_a_skipped_step_counts_its_nonfinite_gradients(path):
    Training(path=path).steps("...!")
    (sample,) = read_run(path).samples
    assert sample.shares.nonfinite == pytest.approx(1 / 49)
    assert sample.worst[0] == "0.weight"
    assert sample.norm == math.inf


def test_a_file_holds_each_skip_and_each_scale(path):
    Training(path=path).steps(".!..!!...").close()
    run = read_run(path)
    assert [sample.step for sample in run.samples] == [4, 6, 9]
    assert run.samples[0].scales == ((1, 1024.0), (3, 512.0))
    assert run.samples[1].scales == ((5, 512.0), (6, 256.0))
    assert run.samples[2].scales == ((7, 128.0),)
    assert run.samples[1].skips == (5, 6)
    assert [skip.step for skip in run.skips] == [2, 5, 6]
    assert run.starts[0].policy["name"] == "DynamicScale"
    assert run.starts[0].policy["init_scale"] == 1024.0
    assert not [name for name in run.starts[0].policy if name.startswith("_")]


def test_a_resumed_run_continues_counting(path):
    Training(path=path).steps("...!").close()
    Training(path=path).steps("!...").close()
    run = read_run(path)
    assert [start.step for start in run.starts] == [0, 4]
    assert run.skipped == (4, 5)
    assert run.num_steps == 8


def test_at_most_ten_gradients_of_a_skip_are_listed(path):
    weights = [torch.ones(1, requires_grad=True) for _ in range(12)]
    step, _ = one_step(path, weights, sum(weights).sum() * math.nan)
    assert len(step.nonfinite) == 12
    (skip,) = read_run(path).skips
    assert (len(skip.nonfinite), skip.more) == (10, 2)


# Stuck.


def test_it_warns_once_in_a_streak_where_update_was_called(path):
    training = Training(stuck_after=3, path=path, scale=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.steps("!!!!!.!!.!!!!")
    assert [warning.category for warning in caught] == [StuckWarning, StuckWarning]
    assert caught[0].filename == __file__
    training.monitor.close()
    assert [verdict.step for verdict in read_run(path).verdicts] == [3, 12, 13]  # at close


def test_it_raises_before_the_scale_moves_and_the_next_update_continues():
    training = Training(stuck_after=2, on_stuck="raise", scale=1.0)
    training.step(finite=False)
    training.backward(finite=False)
    training.scaler.step(training.optimizer)
    with pytest.raises(StuckError, match=r"0\.weight"):
        training.scaler.update()
    assert training.scaler.get_scale() == 0.5
    training.scaler.update()
    assert training.scaler.get_scale() == 0.25
    assert len(training.steps("!.").monitor.history) == 4


@pytest.mark.parametrize(
    ("flags", "scale", "num_verdicts", "kind", "text"),
    [
        ("!!!......", 2.0**10, 1, "normal", "3 of 9 steps were skipped"),  # it recovered
        ("!.!......", 2.0**10, 0, "normal", "2 of 9 steps were skipped"),
        ("....", 2.0**-16, 0, "underflow", "At a loss scale of 1.52588e-05"),
    ],
)
def test_a_file_and_its_monitor_agree(flags, scale, num_verdicts, kind, text, path):
    scaler = GradScaler(policy=FixedScale(scale) if scale < 1 else DynamicScale(scale))
    options = {"stuck_after": 2, "on_stuck": "continue", "autocast": True, "path": path}
    training = Training(scaler=scaler, **options).steps(flags)
    assert len(read_run(path).verdicts) == num_verdicts  # without a word
    verdict = training.close().verdict
    assert read_run(path).verdict == verdict
    assert verdict.kind == kind
    assert verdict.text.startswith(text)


def test_a_final_verdict_is_given_once_in_a_streak(path):
    training = Training(scale=8.0, stuck_after=2, on_stuck="continue", path=path).steps("!!!!!!!!")
    given = [(line.step, line.verdict) for line in read_run(path).verdicts]
    assert given == [(2, "normal"), (4, "floor")]  # a scale below 8 might have been enough
    assert training.close().verdict.kind == "floor"


def test_a_closure_that_overflows_at_every_scale_counts():
    scaler = GradScaler(init_scale=1.0, max_retries=1)
    training = Training(stuck_after=2, on_stuck="raise", scaler=scaler)
    training.scaler.step(training.optimizer, lambda: training.backward(finite=False))
    training.scaler.update()
    training.scaler.step(training.optimizer, lambda: training.backward(finite=False))
    with pytest.raises(StuckError):
        training.scaler.update()


def test_modules_are_never_listened_to():
    training, call = Training(stuck_after=3, on_stuck="continue"), torch.nn.Module.__call__
    for flags in ("!!", "!", ".", "!!"):
        training.steps(flags)
        assert torch.nn.Module.__call__ is call
    training.close()


class Root(torch.nn.Module):
    """Its gradient at 0 is Inf, and 0 * Inf is NaN."""

    def forward(self, inputs):
        return (inputs * 0).sqrt() + inputs


class Half(torch.nn.Module):
    """Overflows as float16 does."""

    def forward(self, inputs):
        return (inputs * 1e6).half().float()


def with_nan(model, name):
    """The model, not training, with a NaN in a parameter or a buffer."""
    with torch.no_grad():
        model.eval().state_dict()[name].view(-1)[0] = math.nan
    return model


def frozen():
    """A model whose first layer is not trained."""
    return seq(linear(4, 2).requires_grad_(False), torch.nn.BatchNorm1d(2), linear(2, 1))


@pytest.mark.parametrize("forensics", [0, 1, 100])
@pytest.mark.parametrize(
    ("kind", "where", "model"),
    [
        ("nan", "0.weight", seq(linear(4, 2), Root())),
        ("activations", "1", seq(linear(4, 2), Half())),
        ("parameter", "2.weight", with_nan(frozen().requires_grad_(), "2.weight")),
        ("parameter", "0.weight", with_nan(frozen(), "0.weight")),  # which is not trained
        ("parameter", "1.running_mean", with_nan(frozen(), "1.running_mean")),
    ],
)
def test_the_culprit_is_named_whichever_skips_are_inspected(kind, where, model, forensics):
    options = {"stuck_after": 4, "on_stuck": "raise", "forensics": forensics}
    training = Training(model=copy.deepcopy(model), scale=4.0, **options)
    with pytest.raises(StuckError) as raised:
        training.steps("." * 9)
    verdict = training.monitor.verdict
    assert (verdict.kind, verdict.where) == (kind, where)
    assert str(raised.value) == f"{verdict.text} To go on all the same, call update() again."


def train_in_float16(scaler, model, steps, watched=None, **options):
    """Trains on the same batch, and returns the monitor."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(32, 16), torch.randint(0, 4, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = Monitor(scaler, watched or model, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return monitor


def classifier():
    torch.manual_seed(1)
    gelu = torch.nn.GELU()
    return seq(linear(16, 64), gelu, linear(64, 64), gelu, linear(64, 4))


@pytest.mark.parametrize("exponent", [32, 44, 60, 127])
def test_a_healthy_training_from_a_far_too_large_scale_is_left_alone(exponent, path):
    scaler = GradScaler(init_scale=2.0**exponent)
    monitor = train_in_float16(scaler, classifier(), exponent, on_stuck="raise", path=path)
    assert not monitor.history[-1].skipped
    assert monitor.verdict.kind == "normal"
    assert {verdict.verdict for verdict in read_run(path).verdicts} <= {"normal"}


def test_a_nan_is_reported_once_the_scale_has_fallen_to_1(path):
    model = seq(linear(4, 2), Root())
    training = Training(stuck_after=4, on_stuck="raise", model=model, path=path)
    training.stuck("." * 20, r"The gradient of 0\.weight is NaN")
    assert training.scaler.get_scale() == 1.0
    verdicts = read_run(path).verdicts
    assert [(verdict.step, verdict.verdict) for verdict in verdicts] == [(4, "normal"), (11, "nan")]


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile", "compiled given"])
def test_a_compiled_model_is_trained_on_while_it_is_watched(how):
    model = trained = classifier()
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    if how == "Module.compile":
        model.compile(backend="eager")
    else:
        trained = torch.compile(model, backend="eager")
    watched = trained if how == "compiled given" else model
    monitor = train_in_float16(GradScaler(), trained, 22, watched, on_stuck="continue")
    assert monitor.verdict.kind in ("activations", "loss")


def test_an_error_in_watching_does_not_reach_the_training(monkeypatch, capsys):
    def fail(*_, **__):
        raise ZeroDivisionError

    # No module or gradient that a user can write makes the watching itself fail.
    monkeypatch.setattr("gradscaler.diagnose._monitor.observer.inspect", fail)
    training = Training(stuck_after=3, on_stuck="continue")
    before = training.scaler.get_scale()
    training.steps("!!!")
    assert training.scaler.get_scale() == before / 8
    assert "an error of gradscaler's own ended the watch" in capsys.readouterr().err


class Mask(torch.nn.Module):
    def forward(self, inputs):
        return torch.full((inputs.shape[1], inputs.shape[1]), -math.inf).triu(1)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = Mask()

    def forward(self, inputs):
        hidden = inputs.view(8, 4, 16)
        mask = self.mask(hidden).to(hidden.dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(hidden, hidden, hidden, attn_mask=mask).flatten(0, 1)


def test_a_module_that_makes_a_mask_is_not_blamed_for_a_scale_too_large():
    model = seq(linear(16, 16), Attention(), linear(16, 4))
    monitor = train_in_float16(GradScaler(init_scale=2.0**50), model, 22, on_stuck="raise")
    assert monitor.verdict.kind == "normal"


def test_a_layer_that_overflows_to_negative_infinity_alone_is_named():
    model = seq(linear(16, 8), torch.nn.ReLU(), linear(8, 4))
    with torch.no_grad():
        model[2].weight.fill_(-1e5)
    monitor = train_in_float16(GradScaler(), model, 20, on_stuck="continue")
    assert (monitor.verdict.kind, monitor.verdict.where) == ("activations", "2")


def test_a_nonfinite_batch_is_reported_with_the_line_that_reads_it():
    training = Training(stuck_after=4, on_stuck="raise")
    training.inputs[0, 0] = math.nan
    words = r"The batch itself holds Inf or NaN .*first seen in matmul at .*test_monitor\.py:\d+"
    assert training.stuck("." * 9, words).verdict.kind == "data"


def alternate(monitored, steps, **options):
    """Trains two models in turn, each with an update of its own; one model is NaN."""
    models = torch.nn.ModuleList([classifier(), classifier()])
    with torch.no_grad():
        models[1][0].weight[0, 0] = math.nan
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    scaler, inputs = GradScaler(), torch.randn(8, 16)
    monitor = Monitor(scaler, models if monitored else None, **options)
    for _ in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return monitor


def test_a_streak_of_skips_is_one_optimizer_s():
    with pytest.raises(StuckError, match=r"1\.0\.weight is itself.* last 20 steps"):
        alternate(True, 20, on_stuck="raise")
    verdict = alternate(True, 40, on_stuck="continue").verdict
    assert (verdict.kind, verdict.where) == ("parameter", "1.0.weight")
    assert "last 20 steps" in verdict.text  # that verdict was final


def test_an_optimizer_that_stops_stepping_is_forgotten():
    options = {"stuck_after": 3, "on_stuck": "continue", "autocast": True}
    training = Training(scale=1.0, **options).steps("!!!!")
    assert training.monitor.verdict.kind == "floor"
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-3)
    training.steps("....")
    assert training.monitor._log.stuck_streak is None
    assert training.monitor.verdict.text.startswith("The loss scale is 0.0625")


def test_a_verdict_gives_the_whole_fall_of_the_scale():
    monitor = Training(stuck_after=4, on_stuck="continue").steps("!" * 20).monitor
    words = "last 11 steps were skipped while the scale fell from 1024 to 1."
    assert words in monitor.verdict.text


def test_a_verdict_counts_at_close_the_skips_that_followed_it(tmp_path):
    path = tmp_path / "run.jsonl"
    options = {"stuck_after": 4, "on_stuck": "continue", "path": path}
    scaler = GradScaler(policy=FixedScale(1.0))
    monitor = Training(scaler=scaler, **options).steps("!" * 9).monitor
    before = monitor.verdict
    monitor.close()
    after = monitor.verdict
    assert after.kind == before.kind
    assert after.text == before.text.replace("the last 4 steps", "the last 9 steps") != before.text
    assert read_run(path).verdict == after


@pytest.mark.parametrize(
    "policy", [FixedScale(8.0), DynamicScale(32.0, min_scale=8.0), DynamicScale(1.0)]
)
def test_a_scale_at_its_floor_is_reported(policy):
    training = Training(scaler=GradScaler(policy=policy), stuck_after=4, on_stuck="raise")
    verdict = training.stuck("!" * 9).verdict
    assert (verdict.kind, verdict.where) == ("floor", "0.weight")


# Logs, and arguments.


def test_a_log_gets_the_numbers_of_each_sample():
    calls = []

    def log(scalars, step):
        calls.append((step, scalars))

    Training(log=log).steps("...." + "!...").close()
    samples = [(step, got) for step, got in calls if "gradscaler/skipped_steps" in got]
    keys = "loss_scale", "skipped_steps"
    numbers = [(step, *(got[f"gradscaler/{key}"] for key in keys)) for step, got in samples]
    assert numbers == [(4, 1024, 0), (6, 512, 1), (8, 512, 0)]
    assert [step for step, got in samples if "gradscaler/gradient_norm" in got] == [4, 6]
    shares = {"zero", "flushed", "subnormal", "normal", "overflow", "nonfinite"}
    assert {f"gradscaler/{name}" for name in shares} <= set(samples[0][1])
    assert {type(n) for _, got in calls for n in got.values()} == {float}


def test_a_log_gets_the_kind_of_each_finding_of_a_verdict():
    calls = []

    def log(scalars, step):
        calls.append((step, scalars))

    verdict = Training(scale=1.0, on_stuck="raise", stuck_after=9, log=log).stuck("!" * 9).verdict
    kinds = {f"gradscaler/findings/{finding.kind}": 1.0 for finding in verdict.findings}
    assert kinds
    assert (9, kinds) in calls


def test_a_log_that_raises_is_called_no_more_and_training_goes_on():
    steps = []

    def log(scalars, step):
        steps.append(step)
        raise OSError("no server")

    training = Training(log=log)
    with pytest.warns(RuntimeWarning, match=r"log is called no more.*no server"):
        training.steps("...." * 3).close()
    assert steps == [4]
    assert training.monitor.history[-1].step == 12


def assert_refused(error, message, **arguments):
    """The monitor refuses these arguments, and the scaler stays unobserved."""
    scaler = GradScaler()
    with pytest.raises(error, match=message):
        Monitor(scaler, **arguments)
    assert scaler._observers == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 1.5}, TypeError, "every must be an integer"),
        ({"forensics": -1}, ValueError, "forensics must be at least 0"),
        ({"stuck_after": 0}, ValueError, "stuck_after must be at least 1"),
        ({"on_stuck": "panic"}, ValueError, "on_stuck must be one of 'warn', 'raise', 'continue'"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of float16"),
        ({"model": 3}, TypeError, "model must have named_parameters, got int"),
        ({"log": "runs"}, TypeError, "log must be a function or None, got 'runs'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_opened(arguments, error, message, path):
    assert_refused(error, message, path=path, **arguments)
    assert not path.exists()


def test_what_is_not_a_scaler_is_refused():
    for other in (torch.amp.GradScaler("cpu"), None):
        with pytest.raises(TypeError, match="scaler must be one of gradscaler's") as caught:
            Monitor(other)
        assert str(caught.value).endswith(f"got {other!r} ({type(other).__name__})")


def test_a_foreign_file_is_refused(path):
    path.write_text("dear diary\n")
    assert_refused(ValueError, r"run\.jsonl: line 1", path=path)
    assert path.read_text() == "dear diary\n"
