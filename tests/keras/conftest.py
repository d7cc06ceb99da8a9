from tests.support.chosen import cover_values
from tests.support.keras_like import variables
from tests.support.ranks import ranks

__all__ = ["ranks", "variables"]


def pytest_collection_modifyitems(items):
    """The same code runs on each backend, whose runs choose other cases."""
    cover_values(items, __file__)
