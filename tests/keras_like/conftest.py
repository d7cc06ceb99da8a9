from tests.support.keras_like import family, variables
from tests.support.ranks import ranks

__all__ = ["family", "ranks", "variables"]
