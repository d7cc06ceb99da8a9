"""The eager frameworks in words that all of them share, so that one test runs on each.

``library`` is the framework that GRADSCALER_FRAMEWORK names, PyTorch where it is not set::

    from tests.support.eager import library

    def test_a_step_subtracts_the_true_gradient(backward, finite):
        parameters = library.parameters()
        optimizer = library.sgd(parameters, lr=1.0)
        scaler = library.scaler(init_scale=1024.0)
        library.backward(scaler, parameters, finite)
        scaler.step(optimizer)
        scaler.update()

Calls that every scaler has are written out: ``scaler.step(optimizer)``. The library is for what the
frameworks spell differently. ``Library`` in ``base.py`` documents it all; ``on_torch.py`` and
the others say what differs. Its fixtures are in ``tests/eager/conftest.py``. A framework's own
tests may import it too.

Arrays: tests keep values as NumPy arrays. ``library.tensor`` makes a tensor of one,
``library.numpy`` an array of a tensor, and ``library.exact`` compares any of both to the bit.
"""

import importlib
import os

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")

library = importlib.import_module(f"tests.support.eager.on_{FRAMEWORK}").instance
