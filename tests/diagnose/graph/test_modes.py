"""Modes of PyTorch that a script enters and leaves while calls of functions are watched."""

import threading

import pytest

pytest.importorskip("torch")

import torch
from torch._dynamo import eval_frame  # the stance has no public name
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from gradscaler.diagnose._graph.calls import CallWatch


class Own(TorchFunctionMode):
    """A mode of the script's, which adds to what torch.ones makes."""

    def __init__(self, more):
        super().__init__()
        self.more = more

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + self.more if func is torch.ones else result


def entered_before(start, stop, see):
    with Own(1):
        see()
        start()
        see()
    see()
    stop()


def left_after(start, stop, see):
    start()
    with Own(1):
        see()
        stop()
        see()


def nested(start, stop, see):
    with Own(1):
        with Own(2):
            start()
            with Own(4):
                see()
        see()
        with Own(8):
            stop()
            see()


def device_before(start, stop, see):
    with torch.device("meta"):
        start()
        see()
    see()
    stop()


def device_after(start, stop, see):
    start()
    with torch.device("meta"), Own(1):
        see()
        stop()
    see()


def default_device(start, stop, see):
    torch.set_default_device("meta")
    try:
        start()
        see()
        torch.set_default_device(None)
        see()
        torch.set_default_device("meta")
        stop()
        see()
    finally:
        torch.set_default_device(None)


def raises(start, stop, see):
    try:
        with Own(1):
            start()
            raise KeyError
    except KeyError:
        see()
    stop()


def generators(start, stop, see):
    def batches():
        with Own(1):
            yield
            see()

    batch = batches()
    next(batch)
    start()
    see()
    next(batch, None)
    see()
    stop()


def never_stopped_in_a_thread(start, stop, see):
    def train():
        with Own(1):
            start()
            see()
        see()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    stop()


CASES = [
    entered_before,
    left_after,
    nested,
    device_before,
    device_after,
    default_device,
    raises,
    generators,
    never_stopped_in_a_thread,
]


@pytest.mark.parametrize("case", CASES)
def test_a_script_s_modes_are_as_without_a_watch(case):
    calls = []
    watch = CallWatch(calls.append)

    def seen_in(start, stop):
        seen = []

        def see():
            modes = [each for each in _get_current_function_mode_stack() if each is not watch.mode]
            made = torch.ones(())
            seen.append((str(made.device), None if made.is_meta else float(made), len(modes)))

        case(start, stop, see)
        assert not _get_current_function_mode_stack()
        return seen

    expected = seen_in(lambda: None, lambda: None)
    assert calls == []
    assert seen_in(watch.start, watch.stop) == expected
    assert calls
    assert eval_frame._stance.stance == "default"


@pytest.mark.parametrize("last", [0, 1], ids=["the first ends last", "the second ends last"])
@pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
def test_two_watches_restore_a_script_s_stance(stance, last):
    watches = [CallWatch(lambda call: None) for _ in range(2)]
    with torch.compiler.set_stance(stance):
        for each in watches:
            each.start()
        watches[1 - last].stop()
        assert eval_frame._stance.stance == "force_eager"
        watches[last].stop()
        assert eval_frame._stance.stance == stance
    assert eval_frame._stance.stance == "default"


def test_a_view_whose_node_pytorch_does_not_tell_is_left_out_of_a_call():
    base, weight, made = torch.zeros(2, 3), torch.ones(3, requires_grad=True), []
    with torch.no_grad():
        view = base[0]
    base[1].add_(weight)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        _ = view.grad_fn
    watch = CallWatch(lambda call: made.append(([*call.inputs], [*call.outputs])))
    watch.start()
    view.data_ptr()
    torch.stack([view.data, weight])
    view.is_contiguous()
    watch.stop()
    assert [len(inputs) for inputs, _ in made] == [0, 2, 0]
    assert all(each.grad_fn is None or each is not view for _, out in made for each in out)
