"""``gradscaler.watch()`` does what ``gradscaler run`` does, from inside, and undoes it."""

import io
import os
import sys
import threading
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import gradscaler
from gradscaler._run_script import voice
from gradscaler._run_script.files import RunFiles
from gradscaler._run_script.options import MOST_RUNS
from gradscaler.diagnose import read_run
from tests.support import programs
from tests.support.marked_lines import lines_marked_in

# What a watch replaces.
PLACES = [
    (torch.optim.Optimizer, "__init__"),
    (torch.optim.lr_scheduler.LRScheduler, "__init__"),
    (torch.autograd.set_detect_anomaly, "__init__"),
    (torch.nn.Module, "load_state_dict"),
    (torch.utils.data.DataLoader, "__iter__"),
    (torch.autograd, "backward"),
    (torch.amp.GradScaler, "scale"),
    (torch.distributed, "init_process_group"),
    (sys, "excepthook"),
]


def replaced():
    return [vars(owner).get(name) for owner, name in PLACES]


def network():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, scaler=None, steps=5):
    """A training whose gradient is NaN in its last step; its bits."""
    for step in range(steps):
        loss = (model(torch.randn(8, 4)) * (step < steps - 1)).square().sum().sqrt()  # 0
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [parameter.tolist() for parameter in model.parameters()]


def healthy(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()


class FetchesAhead(torch.utils.data.DataLoader):
    """Fetches a batch before it gives the one before, as Accelerate's does."""

    def __iter__(self):
        batches = super().__iter__()
        before = next(batches)
        for batch in batches:
            yield before
            before = batch
        yield before


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.utils.data.DataLoader, {}),
        (torch.utils.data.DataLoader, {"num_workers": 1, "persistent_workers": True}),
        (FetchesAhead, {}),
    ],
    ids=["one process", "a worker that stays", "a loader that fetches ahead"],
)
def test_the_file_has_the_epoch_and_the_batch_of_a_step(tmp_path, kind, options):
    data = list(torch.ones(24, 4))
    with gradscaler.watch(tmp_path, every=1):
        model, optimizer = network()
        loader, others = kind(data, 4, **options), torch.utils.data.DataLoader(data, 8)
        next(iter(others))  # it feeds no loss
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                model(batch[:2]).square().mean().backward()  # a step has two losses
                model(batch[2:]).square().mean().backward()
                optimizer.step()
            for batch in others:
                model(batch)
        for first, _ in zip(loader, others, strict=False):  # it is not known which one feeds
            optimizer.zero_grad()
            model(first).square().mean().backward()
            optimizer.step()
    (file,) = tmp_path.glob("*.jsonl")
    of_epochs = {6 * e + b: (e + 1, b) for e in range(2) for b in range(1, 7)}
    assert read_run(file).batches == (of_epochs if kind is torch.utils.data.DataLoader else {})


def test_a_loader_that_is_gone_while_its_batches_are_given_has_no_epoch(tmp_path):
    with gradscaler.watch(tmp_path, every=1):
        model, optimizer = network()
        for batch in torch.utils.data.DataLoader(list(torch.ones(8, 4)), 4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    (file,) = tmp_path.glob("*.jsonl")
    run = read_run(file)
    assert (run.num_steps, run.batches) == (2, {})


def test_the_first_step_has_its_line_where_the_loop_turns_the_anomaly_mode_off(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        model, optimizer = network()
        with torch.autograd.set_detect_anomaly(False):  # as Lightning does for fit()
            train(model, optimizer, steps=1)
        assert not torch.is_anomaly_enabled()
        line = lines_marked_in(__file__)("0")
        assert f"by the gradient of sqrt at {line}, " in watch.verdict.text


def test_a_report_of_a_run_that_goes_on_has_its_latest_steps(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        healthy(*network(), steps=30)
        watch.report(tmp_path / "report.html")
        (file,) = tmp_path.glob("*.jsonl")
        assert read_run(file).num_steps == 30


def test_a_training_is_watched_whose_model_and_optimizer_are_there(tmp_path):
    before, finders = replaced(), sys.meta_path.copy()
    unwatched = train(*network())
    made = network()
    watch = gradscaler.watch(tmp_path)
    assert watch.verdict is None
    with pytest.raises(ValueError, match="no step was seen yet"):
        watch.report(tmp_path / "report.html")
    assert str(train(*made)) == str(unwatched)
    (finding,) = watch.verdict.findings
    assert finding.line.startswith("tests/torch/run_script/test_watch.py:")
    watch.report(tmp_path / "report.html")
    assert "by the gradient of sqrt" in (tmp_path / "report.html").read_text()
    watch.stop()
    assert replaced() == before
    assert sys.meta_path == finders
    assert type(torch.amp.GradScaler("cpu")) is torch.amp.GradScaler
    assert watch.verdict.findings == (finding,)
    (file,) = tmp_path.glob("*.jsonl")
    assert read_run(file).num_steps == 5


@pytest.mark.parametrize("is_quiet", [False, True])
def test_quiet_says_nothing_before_the_verdict(tmp_path, monkeypatch, is_quiet):
    said = io.StringIO()
    monkeypatch.setattr(voice, "_STDERR", said)
    with gradscaler.watch(tmp_path, quiet=is_quiet):
        train(*network())
        assert (said.getvalue() == "") == is_quiet
    assert ("as said above" in said.getvalue()) != is_quiet
    assert " ".join(said.getvalue().split()).count("Add a small number under the root") == 1


def test_a_text_in_a_log_file_begins_below_the_bar_of_tqdm(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    voice.voice.note("a text")
    assert said.getvalue() == "\ngradscaler: a text\n"


def test_a_process_of_a_group_is_a_rank_without_a_launcher(tmp_path, monkeypatch, said):
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    voice.voice.note("a text")
    assert said.getvalue().endswith("gradscaler (rank 1): a text\n")
    file = RunFiles(Namespace(folder=tmp_path)).next()
    assert file.name.endswith(f"-{os.getppid()}.rank1.jsonl")


def test_a_process_that_has_left_its_group_leaves_the_word_to_rank_0(tmp_path, monkeypatch, said):
    monkeypatch.delenv("RANK", raising=False)
    with gradscaler.watch(tmp_path):
        with monkeypatch.context() as joined:
            for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
                joined.setattr(torch.distributed, name, lambda value=value: value)
            healthy(*network())
        voice.voice.note("a text")
    assert said.getvalue() == "gradscaler (rank 1): a text\n"
    voice.voice.note("a text")  # of another watch
    assert said.getvalue().endswith("\ngradscaler: a text\n")


def test_what_went_wrong_with_a_quiet_watch_is_said_where_there_is_no_verdict(
    tmp_path, monkeypatch
):
    said = io.StringIO()
    monkeypatch.setattr(voice, "_STDERR", said)
    with gradscaler.watch(tmp_path, quiet=True):
        voice.attempt(partial(int, "x"))
        assert said.getvalue() == ""
    assert said.getvalue().count("cannot watch this training: ValueError") == 1


def test_a_second_call_returns_the_first_and_its_arguments_count_for_the_next_run(tmp_path):
    with gradscaler.watch(tmp_path / "first") as watch:
        train(*network(), torch.amp.GradScaler("cpu"))
        assert gradscaler.watch(tmp_path / "second") is watch
        train(*network())
    again = gradscaler.watch()
    again.stop()
    assert again is not watch
    first, second = (read_run(*(tmp_path / name).iterdir()) for name in ("first", "second"))
    assert (first.num_steps, bool(first.scales)) == (5, True)
    assert (second.num_steps, bool(second.scales)) == (5, False)


@pytest.fixture
def said(monkeypatch):
    """What is said on stderr."""
    text = io.StringIO()
    monkeypatch.setattr("gradscaler._run_script.voice._STDERR", text)
    return text


def test_a_step_to_watch_is_one_of_the_next_cell_that_trains_alone(tmp_path, monkeypatch, said):
    calls, is_watched = {}, []
    events = SimpleNamespace(register=calls.__setitem__, unregister=lambda name, _: calls.pop(name))
    compiled = SimpleNamespace(format_code_name=lambda _: None)  # no file is a cell's
    shell = SimpleNamespace(events=events, compile=compiled)
    notebook = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    watch = gradscaler.watch(tmp_path, step=3)
    for _ in range(2):
        calls["pre_run_cell"](None)
        train(*network())
        info = SimpleNamespace(raw_cell="train()")
        calls["post_run_cell"](SimpleNamespace(error_in_exec=None, info=info))
        is_watched.append("step watched: no operation" in said.getvalue())
        said.truncate(0)
    watch.stop()
    assert is_watched == [True, False]
    assert not calls


@pytest.mark.parametrize("status", [0, 1])
def test_an_exit_with_an_error_is_that_of_a_script_that_failed(tmp_path, said, status):
    def script():
        healthy(*network())
        sys.exit(status)

    with pytest.raises(SystemExit), gradscaler.watch(tmp_path):
        script()
    assert ("the script ended after step 2" in said.getvalue()) == bool(status)


@pytest.mark.parametrize("given", [{"every": 0}, {"step": 0}])
def test_a_wrong_number_is_refused_and_begins_no_watch(given):
    before = replaced()
    with pytest.raises(ValueError, match=f"{next(iter(given))} must be at least"):
        gradscaler.watch(**given)
    assert replaced() == before


EARLY = """
import os
import gradscaler
watch = gradscaler.watch()
import torch
def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = (model(torch.randn(8, 4)) * (step < 4)).square().sum().sqrt()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
train()
if (child := os.fork()) == 0:
    with gradscaler.watch("of_child") as own:
        print(own is watch)
        train()
    os._exit(0)
os.waitpid(child, 0)
raise RuntimeError("the loss is nan")
"""


@pytest.mark.parametrize("under", [(), ("-m", "gradscaler", "run")], ids=["alone", "run"])
def test_a_watch_before_the_import_says_the_verdict_after_the_traceback(tmp_path, under):
    (tmp_path / "script.py").write_text(EARLY)
    ended = programs.run(*under, "script.py", cwd=tmp_path)
    said = " ".join(ended.stderr.split())
    assert (ended.returncode, ended.stdout) == (1, "False\n")
    assert said.count("by the gradient of sqrt at script.py:11") == 4  # a half is the child's
    assert said.index("the loss is nan") < said.rindex("gradscaler: after 5 steps, as said above")
    folders = [tmp_path / name for name in ("gradscaler-runs", "of_child")]
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1]


THEIRS = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
import gradscaler
watch = gradscaler.watch()
for step in range(6):
    if step == 3:
        print(watch.verdict)
        scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
watch.stop()
"""


def test_a_loss_that_an_earlier_scaler_scales_is_not_taken_for_one_without_a_scale(tmp_path):
    (tmp_path / "script.py").write_text(THEIRS)
    ended = programs.run("script.py", cwd=tmp_path)
    said = " ".join(ended.stderr.split())
    assert (ended.returncode, ended.stdout) == (0, "None\n")
    assert said.count("a GradScaler that was made before gradscaler.watch()") == 1
    assert "gradscaler: after 3 steps: " in said


def test_the_last_run_that_is_watched_ends_where_another_would_begin(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        for _ in range(MOST_RUNS):
            train(*network(), steps=2)
        assert watch.verdict is not None
        train(*network())
        assert watch.verdict is None
    runs = [read_run(file) for file in tmp_path.iterdir()]
    assert [run.num_steps for run in runs] == [2] * MOST_RUNS


def test_a_second_watch_sees_a_training_in_another_thread(tmp_path):
    with gradscaler.watch(tmp_path):
        train(*network())
    with gradscaler.watch(tmp_path) as watch:
        thread = threading.Thread(target=lambda: train(*network()))
        thread.start()
        thread.join()
        (finding,) = watch.verdict.findings
    assert finding.line.startswith("tests/torch/run_script/test_watch.py:")


class Grows(torch.nn.Module):
    factor = 1.0

    def forward(self, inputs):
        return inputs * self.factor


def test_the_model_is_known_if_an_engine_trains_a_flat_copy_of_it(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Grows())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = list(model.parameters())
        flat = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(weights).detach())
        optimizer.param_groups[0]["params"] = [flat]  # as ZeRO does
        for step in range(1, 5):
            model[1].factor = 1e39 if step == 4 else 1.0
            model(torch.ones(8, 4)).square().mean().backward()
            flat.grad = torch.cat([p.grad.flatten() for p in weights])
            optimizer.step()
            model.zero_grad()
            torch.nn.utils.vector_to_parameters(flat.detach(), weights)
    assert "1 (Grows) makes 32 Inf in float32, by mul" in watch.verdict.text
    assert "so step 4 was applied" in watch.verdict.text


CHILDREN = """
import os
import torch
from torch.multiprocessing import spawn

def child(rank):
    import gradscaler
    gradscaler.watch("runs")
    store = "file://" + os.path.abspath("store")
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    spawn(child, nprocs=2)
"""


@pytest.mark.rare("the test of a process that has left its group asks the same in one process")
def test_a_child_that_has_left_its_group_is_still_a_rank(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    script = tmp_path / "train.py"
    script.write_text(CHILDREN)
    done = programs.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("after 3 steps: ") == 1
    assert done.stderr.count("(rank 0): after 3 steps: ") == 1
    assert len(list(tmp_path.glob("runs/*.rank[01].jsonl"))) == 2
