from tests.support.ranks import ranks

__all__ = ["ranks"]
