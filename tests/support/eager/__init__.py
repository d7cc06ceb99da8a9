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

Calls that every scaler has are written out: ``scaler.step(optimizer)``. The library has the calls
that frameworks spell differently. ``Library`` in ``base.py`` documents them; ``on_torch.py`` and
the others implement them. Fixtures are in ``tests/eager/conftest.py``. A framework's own tests may
import the library too.

Tests keep values as NumPy arrays. ``library.tensor`` converts one to a tensor, ``library.numpy``
converts it back, and ``library.exact`` compares both kinds to the bit.
"""

import importlib
import os

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")

library = importlib.import_module(f"tests.support.eager.on_{FRAMEWORK}").instance
