"""The lines of calls that belong to a step, as the code that makes the step shows them."""

import sys
import threading

import pytest

pytest.importorskip("torch")

from gradscaler.diagnose._graph.step_lines import lines_around

FILE = "train.py"
LOOP = """
def evaluate(model):
    model.eval()
    return model

def train(model, optimizer, scheduler):
    for loss in ():
        loss.backward(), optimizer.zero_grad()
    clip_grad_norm_(model.parameters(), 1.0)
    step(optimizer)
    scheduler.step()

def main():
    train(FakeModel(), None, Schedule())

main()
"""


class FakeModel:
    def parameters(self):
        return ()


class Schedule:
    def step(self):
        """Do nothing."""


def lines_in(source, file=FILE):
    """What the lines around the one call of step() in some code are."""
    found = []
    names = {
        "step": lambda _: found.append(lines_around(sys._getframe(1))),
        "clip_grad_norm_": lambda *_: None,
        "FakeModel": FakeModel,
        "Schedule": Schedule,
    }
    # In a thread of its own, as the frames below those of a worker of pytest-xdist have lines, too.
    runner = threading.Thread(target=exec, args=(compile(source, file, "exec"), names))
    runner.start()
    runner.join()
    (lines,) = found
    return lines


def test_each_call_has_its_line():
    assert lines_in(LOOP) == {
        "step": f"{FILE}:10",
        "backward": f"{FILE}:8",
        "zero": f"{FILE}:8",
        "clip": f"{FILE}:9",
        "schedule": f"{FILE}:11",
        "eval": f"{FILE}:3",  # in a function that does not lead to the step
    }


def test_a_call_that_two_lines_make_is_left_out():
    twice = LOOP.replace("    clip", "    clip_grad_norm_((), 2.0)\n    clip")
    assert "clip" not in lines_in(twice)
    assert lines_in(twice)["backward"] == f"{FILE}:8"


def test_the_function_that_steps_counts_before_others():
    other = LOOP.replace("    model.eval()", "    model.eval()\n    model().backward()")
    assert lines_in(other)["backward"] == f"{FILE}:9"


def test_a_text_is_no_call():
    assert "clip" not in lines_in("step('clip_grad_norm_')\nx = 'eval'")


def test_a_step_in_an_installed_package_has_no_lines():
    assert lines_in(LOOP, "/usr/lib/site-packages/trainer/loop.py") == {}
