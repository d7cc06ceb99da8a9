"""The last word before SIGTERM; that it ends the process is tested with a whole training."""

import os
import signal

import pytest

# The launcher's parts are not public.
from gradscaler._run_script.termination import before_termination

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture(autouse=True)
def default():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_program_that_asks_for_the_handler_sees_the_default():
    before_termination(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is signal.SIG_DFL


def test_a_handler_of_the_program_stays():
    def own(*_):
        pass

    signal.signal(signal.SIGTERM, own)
    before_termination(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_forked_child_dies_without_the_word(capfd):
    before_termination(lambda: print("word", flush=True))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert "word" not in capfd.readouterr().out
