"""What holds for all tests."""

import os

from hypothesis import Phase, settings

if "MUTANT_UNDER_TEST" in os.environ:  # of `make mutants`, to which any failing example will do
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")
