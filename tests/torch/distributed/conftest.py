from tests.support.chosen import cover_values
from tests.support.ranks import ranks

__all__ = ["ranks"]


def pytest_collection_modifyitems(items):
    """One decision is taken for every optimizer, overflow and layout; pairs find no more."""
    cover_values(items, __file__)
