"""Ctrl-C at any line of gradscaler.diagnose: the user repeats the call, and all continues."""

import sys
from bisect import bisect
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from gradscaler import DynamicScale, diagnose
from gradscaler.diagnose import Monitor, StuckError, locate, read_run

# The mark that a monitor reads before it watches, and hooks without a monitor around them.
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.errors import CallOrderError
from gradscaler.torch import GradScaler
from tests.support.interrupts import interrupting, moments, watching

# Their trainings are in float32, which is a finding of its own.
pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")

PACKAGE = str(Path(diagnose.__file__).parent)
PURE = ("arrays.py", "call_site.py", "exponents.py", "formats.py", "histogram.py")
PURE += ("reading.py", "call_origins.py", "masks.py")
PURE += ("lines.py", "nodes.py", "origin.py", "places.py", "reader.py", "slopes.py", "values.py")
PURE += ("calls.py", "search.py")  # run in each call: an interrupt is one in the call


@cache
def is_traced(code):
    """Whether a call of the code may be interrupted, and is not the same as one in its caller."""
    if not code.co_filename.startswith(PACKAGE) or code.co_filename.endswith(PURE):
        return False
    if "/_findings/" in code.co_filename:  # pure functions of records
        return False
    # The collector calls the first too, and ignores its errors. An interrupt in the second is one
    # at the end of optimizer.step() itself. The third calls under a lock: no interrupt comes
    # between the lock and that call, nor between its end and the lock's release, but a trace may.
    return code.co_name not in ("remove_all", "_unless", "safe")


def seen_in(run):
    """The places that a run reaches, in order."""
    seen = []
    run(watching(seen.append, is_traced))
    return seen


def interrupted_at(moment):
    """Raise KeyboardInterrupt at one moment."""
    return interrupting(moment, is_traced)


class Half(torch.nn.Module):
    """Overflows as float16 does."""

    def forward(self, inputs):
        return (inputs * 1e3).half().float()


def model_that_overflows():
    return torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), Half())


def has_hooks(model):
    is_replaced = hasattr(torch.nn.Module.__call__, "__wrapped__")
    if is_replaced or torch.nn.modules.module._has_any_global_hook():
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class CallsAgain:
    """A training by a user who repeats each call that an interrupt stops."""

    def __init__(self, path, call="step", **options):
        self.path, self.call, self.options = path, call, options
        path.unlink(missing_ok=True)
        torch.default_generator.manual_seed(0)
        self.model = model_that_overflows()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self.scaler = GradScaler(init_scale=2.0)
        self.stuck_at = set()

    def run(self, flags, at, disturbance):
        """Step as ``flags`` say, and disturb step ``at``; 0 is the start."""
        with disturbance if at == 0 else nullcontext():
            self.again(self.open)
        for number, flag in enumerate(flags, 1):
            with disturbance if at == number else nullcontext():
                self.step(number, flag == ".")
        with disturbance if at > len(flags) else nullcontext():
            self.again(self.monitor.close)
        return self

    def open(self):
        assert self.scaler._observers == []  # an interrupt left none
        self.monitor = Monitor(self.scaler, self.model, 2, self.path, **self.options)

    def again(self, call, *args):
        try:
            return call(*args)
        except KeyboardInterrupt:
            with suppress(CallOrderError):  # the step was taken, and cannot be repeated
                return call(*args)

    def step(self, number, finite):
        def backward():
            inputs = torch.full((4, 2), 1.0 if finite else 1e3)
            self.optimizer.zero_grad()
            loss = self.model(inputs).square().mean() * number
            self.scaler.scale(loss).backward()
            return loss

        def update():
            _, known, _ = sys.exc_info()  # an interrupt may leave an error that was handled there
            try:
                self.scaler.update()
            except StuckError:
                self.stuck_at.add(number)
                self.scaler.update()
            except KeyboardInterrupt as interrupt:
                told = interrupt.__context__  # the traceback shows both
                if isinstance(told, StuckError) and told is not known:
                    self.stuck_at.add(number)
                raise

        if self.call == "closure":
            self.again(self.scaler.step, self.optimizer, backward)
        else:
            self.again(backward)
            if self.call == "unscale_":
                self.again(self.scaler.unscale_, self.optimizer)
            self.again(self.scaler.step, self.optimizer)
        self.again(update)


def known(training, without=None):
    """The contents of a monitor and its file, without fields that an interrupt may lose."""
    run, monitor = read_run(training.path), training.monitor
    steps, scales = map(list, zip(*run.scales.items(), strict=True))
    found = {
        "steps": [(step.step, step.scale, step.skipped) for step in monitor.history],
        "other steps": [step for step in monitor.history if step.step != without],
        "verdict": monitor.verdict,
        "stuck at": training.stuck_at,
        "run": (run.num_steps, run.skipped, run.verdict),
        "scales": [scales[bisect(steps, step) - 1] for step in range(1, run.num_steps + 1)],
        "verdicts": dict.fromkeys(run.verdicts),
        "skips": [skip for skip in run.skips if skip.step != without],
        "samples": {
            sample.step: (sample.loss, sample.norm, sample.shares, sample.histogram, sample.worst)
            for sample in run.samples
            if sample.step not in (without, run.num_steps)
        },
    }
    return {name: repr(what) for name, what in found.items()}  # so that NaN equals NaN


CASES = {
    "a sample": ({"call": "unscale_"}, "....", 2),
    "a closure": ({"call": "closure", "forensics": 0}, "....", 2),
    "a step that is read later": ({"forensics": 0}, "......", 3),
    "a skip, before the last of too many": ({"on_stuck": "raise"}, ".!!!!..", 3),
    "the last of too many skips": ({"on_stuck": "raise"}, ".!!!!..", 4),
    "one skip more": ({"on_stuck": "raise"}, ".!!!!..", 5),
    "skips that are read later": ({"on_stuck": "raise", "forensics": 0}, ".!!!!!!!..", 5),
    "the start": ({}, "....", 0),
    "the end": ({"forensics": 0}, "...", 4),
}


def run_of(case, path, disturbance):
    options, flags, at = CASES[case]
    return CallsAgain(path, stuck_after=3, **options).run(flags, at, disturbance)


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """The places that each case reaches, in order."""
    path = tmp_path_factory.mktemp("reached") / "run.jsonl"
    return {each: seen_in(partial(run_of, each, path)) for each in CASES}


def own_places(case, reached):
    """The places that a case tries: of the cases that reach a place, two try it.

    Which two, the place's line decides, so that each case has its share.
    """
    reached = {each: set(seen) for each, seen in reached.items()}
    found = set()
    for place in reached[case]:
        cases = [each for each in CASES if place in reached[each]]
        first = place[1] % len(cases)
        if case in (cases * 2)[first : first + 2]:
            found.add(place)
    return found


@pytest.mark.filterwarnings("ignore:.*unclosed file")  # it was opened, but never used
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_loses_the_sample_of_its_step_at_most(case, path, reached):
    run, at = partial(run_of, case, path), CASES[case][-1]
    expected = known(run(nullcontext()), at)
    tried = moments(reached[case], own_places(case, reached))
    assert len(tried) > 5
    for moment in tried:
        training = run(interrupted_at(moment))
        assert known(training, at) == expected, moment
        assert not has_hooks(training.model)
        assert training.scaler._observers == []


def compiled_and_its_graphs():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(lambda: torch.ones(1) + 1, backend=backend), graphs


def test_an_interrupted_locate_leaves_no_mark():
    model = model_that_overflows()
    compiled, graphs = compiled_and_its_graphs()  # so locate runs eagerly
    inputs = torch.full((4, 2), 1e3)

    def run(disturbance):
        with torch.enable_grad(), suppress(KeyboardInterrupt), disturbance:
            locate(model, lambda: model(inputs).mean().backward())

    for moment in moments(seen_in(run)):
        run(interrupted_at(moment))
        assert not is_locating.get(), moment
    compiled()
    assert graphs


def test_an_interrupt_while_locate_sets_the_stance_leaves_none(monkeypatch):
    set_stance = torch.compiler.set_stance
    compiled, graphs = compiled_and_its_graphs()

    def interrupted(stance):
        given = set_stance(stance)
        if stance == "force_eager":
            raise KeyboardInterrupt
        return given

    monkeypatch.setattr(torch.compiler, "set_stance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        locate(model_that_overflows(), lambda: None)
    compiled()
    assert graphs


def test_an_interrupted_closure_of_locate_leaves_no_hook():
    model = model_that_overflows()

    def closure():
        model(torch.ones(1, 2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        locate(model, closure)
    assert not has_hooks(model)


def test_an_interrupted_start_of_hooks_leaves_the_class_of_modules_as_it_was():
    model = model_that_overflows()

    def run(disturbance):
        hooks = ModuleHooks(model)
        with suppress(KeyboardInterrupt), disturbance:
            hooks.start()
        hooks.stop()

    for moment in moments(seen_in(run)):
        run(interrupted_at(moment))
        assert not has_hooks(model)


# Scalers that announce nothing: JAX's, Keras' and MindSpore's. This one is NumPy's.


FLAGS = ".!..!!!!.."
GRADIENTS = {".": np.float32([1.0, 0.5]), "!": np.float32([1.0, np.inf])}


def recorded(path, at, disturbance, **options):
    """The record of all steps, with step ``at`` disturbed, or left out."""
    path.unlink(missing_ok=True)
    policy = DynamicScale(init_scale=4.0)
    state = policy.init()
    scaler = SimpleNamespace(policy=policy, state=state)
    monitor = Monitor(scaler, None, 2, path, stuck_after=3, on_stuck="continue", **options)
    for step, flag in enumerate(FLAGS, 1):
        state = policy.update(state, flag == "!")
        scaler = SimpleNamespace(policy=policy, state=state)
        if step == at and disturbance is None:
            continue
        with suppress(KeyboardInterrupt), disturbance if step == at else nullcontext():
            monitor.record(scaler=scaler, gradients={"weight": GRADIENTS[flag]})
    monitor.close()
    run = read_run(path)
    steps = [(step.step, step.scale, step.skipped) for step in monitor.history]
    return steps, run.num_steps, run.skipped, monitor.verdict.kind


@pytest.mark.parametrize(("at", "forensics"), [(4, 1), (7, 1), (6, 0)])
def test_an_interrupted_record_counts_its_step_once_or_never(at, forensics, path):
    def run(disturbance):
        return recorded(path, at, disturbance, forensics=forensics)

    once, never = run(nullcontext()), run(None)
    assert (len(once[0]), len(never[0])) == (len(FLAGS), len(FLAGS) - 1)
    for moment in moments(seen_in(run)):
        assert run(interrupted_at(moment)) in (once, never), moment
