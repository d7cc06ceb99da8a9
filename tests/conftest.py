"""What holds for all tests."""

import os
import sys

import pytest
from hypothesis import Phase, settings

if "MUTANT_UNDER_TEST" in os.environ:  # of `make mutants`, to which any failing example will do
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")

SEEDING = {
    "torch": "manual_seed",
    "tensorplay": "manual_seed",
    "paddle": "seed",
    "mindspore": "set_seed",
}


@pytest.fixture(autouse=True)
def _the_same_random_numbers_each_time():
    """In whatever order tests run; JAX and Keras take their seeds as arguments."""
    for framework, seed in SEEDING.items():
        if framework in sys.modules:
            getattr(sys.modules[framework], seed)(0)


@pytest.fixture
def own_random_numbers_and_one_thread():
    """For trainings with PyTorch: threads enough for a small network beside other tests."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)
