"""Under torch.compile: compiled models and optimizers, and the scaler inside compiled code."""

import gc
import sys

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gradscaler._on_torch.compile import is_compiling, keep_out_of_graphs
from gradscaler.torch import GradScaler

pytestmark = [
    # Of TorchDynamo's own making, whatever it compiles: it looks at the .grad of what it traces,
    # and imports modules that define TorchScript methods.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
INF = float("inf")


@pytest.fixture(autouse=True)
def a_fresh_compiler():
    gc.collect()  # while a monitor that another test dropped watches operations, none is compiled
    assert not is_in_torch_dispatch_mode()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    return lambda function, **options: torch.compile(function, backend=request.param, **options)


class FiveIterations:
    """Five iterations, the third of which overflows, with a scale that moves at most of them."""

    def __init__(self, kind, make_optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )
        self.forward = self.model
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = kind("cpu", init_scale=256.0, growth_interval=1)
        self.batches = [torch.randn(5, 3) for _ in range(5)]
        self.batches[2][0, 0] = INF

    def loss(self, batch):
        return self.forward(batch).square().mean()

    def scaled_loss(self, batch):
        return self.scaler.scale(self.loss(batch))

    def iteration(self, batch):
        self.optimizer.zero_grad()
        self.scaled_loss(batch).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, exact):
        trace = []
        for batch in self.batches:
            self.iteration(batch)
            trace.append(exact([self.scaler.state_dict(), list(self.model.parameters())]))
        return trace


@pytest.fixture
def eager_trace(exact):
    """The results with torch's own scaler, uncompiled."""
    return FiveIterations(torch.amp.GradScaler).run(exact)


def test_a_compiled_model_trains_as_with_torch(compiled, eager_trace, exact):
    training = FiveIterations(GradScaler)
    training.forward = compiled(training.model)
    assert training.run(exact) == eager_trace


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_a_compiled_optimizer_steps_as_with_torch(way, exact):
    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, **{way: True})

    ours, theirs = (
        FiveIterations(kind, make_optimizer) for kind in (GradScaler, torch.amp.GradScaler)
    )
    for training in (ours, theirs):
        training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")
    assert ours.run(exact) == theirs.run(exact)


def test_scaling_inside_a_compiled_function_follows_the_scale(compiled, eager_trace, exact):
    training = FiveIterations(GradScaler)
    training.scaled_loss = compiled(training.scaled_loss)
    assert training.run(exact) == eager_trace


def test_scaling_breaks_no_graph_and_a_scale_that_moves_recompiles_nothing(eager_trace, exact):
    training = FiveIterations(GradScaler)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    training.scaler.scale(torch.ones(()))
    training.scaled_loss = torch.compile(training.scaled_loss, backend=backend, fullgraph=True)
    assert training.run(exact) == eager_trace
    assert len(graphs) == 1


def test_a_whole_iteration_may_be_compiled(exact):
    ours, theirs = (
        FiveIterations(kind, torch.optim.SGD) for kind in (GradScaler, torch.amp.GradScaler)
    )
    for training in (ours, theirs):
        training.batches = training.batches[1:4]  # the second of which overflows
        training.iteration = torch.compile(training.iteration, backend="eager")
    assert ours.run(exact) == theirs.run(exact)


# The scale moves at each, and the third batch overflows.
@pytest.mark.parametrize("batches", [(1, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("first", ["step", "unscale_"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        torch.optim.SGD,
        lambda parameters: torch.optim.Adam(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    ],
    ids=["SGD", "foreach Adam", "fused AdamW", "fused SGD"],
)
@pytest.mark.covering(1)  # a break is in one call, whatever the others are
def test_a_whole_iteration_makes_no_more_graphs_and_breaks_than_with_torch(
    make_optimizer, first, batches, exact
):
    traces, graphs, breaks = [], [], []
    for kind in (GradScaler, torch.amp.GradScaler):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        training = FiveIterations(kind, make_optimizer)
        training.batches = [training.batches[i] for i in batches]
        if first == "unscale_":
            training.scaler.step = lambda optimizer, scaler=training.scaler: (
                scaler.unscale_(optimizer),
                type(scaler).step(scaler, optimizer),
            )
        training.iteration = torch.compile(training.iteration, backend="eager")
        traces.append(training.run(exact))
        counters = torch._dynamo.utils.counters
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(sum(counters["graph_break"].values()))
    assert traces[0] == traces[1]
    assert graphs[0] <= graphs[1]
    assert breaks[0] <= breaks[1]


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_a_step_without_a_scaler_is_no_single_graph_either(way):
    training = FiveIterations(GradScaler, lambda p: torch.optim.AdamW(p, **{way: True}))
    training.loss(training.batches[0]).backward()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(training.optimizer.step, backend="eager", fullgraph=True)()


def test_clipping_and_outcomes_work_with_a_compiled_model():
    training = FiveIterations(GradScaler)
    training.forward = torch.compile(training.model, backend="eager")
    applied = []
    for batch in training.batches:
        training.optimizer.zero_grad()
        training.scaled_loss(batch).backward()
        training.scaler.clip_grad_norm_(training.optimizer, 1e-3)
        training.scaler.step(training.optimizer)
        training.scaler.update()
        applied.append(training.scaler.last_step(training.optimizer).applied)
    assert applied == [True, True, False, True, True]


def test_a_closure_may_run_a_compiled_model(exact):
    parameters = []
    for forward in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        training = FiveIterations(GradScaler, torch.optim.LBFGS)
        training.forward = forward(training.model)

        def closure(training=training):
            training.optimizer.zero_grad()
            loss = training.loss(training.batches[0])
            training.scaler.scale(loss).backward()
            return loss

        training.scaler.step(training.optimizer, closure)
        parameters.append(exact(list(training.model.parameters())))
    assert parameters[0] == parameters[1]


@pytest.fixture(params=["a name", "the module"])
def without_private_names(request, monkeypatch):
    """A release of PyTorch without the names that keep code out of graphs."""
    torch.compile(torch.sin, backend="eager")(torch.ones(()))  # the compiler itself has them
    if request.param == "the module":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo", None)
    else:
        from torch._C._dynamo import eval_frame

        for name in ("_FrameExecStrategy", "set_code_exec_strategy", "get_eval_frame_callback"):
            monkeypatch.delattr(eval_frame, name)


@pytest.mark.usefixtures("without_private_names")
def test_without_private_names_the_public_one_says_whether_something_is_compiled(monkeypatch):
    keep_out_of_graphs()
    assert not is_compiling()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_compiling()
