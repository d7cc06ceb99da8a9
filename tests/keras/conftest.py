from tests.support.keras_like import variables
from tests.support.ranks import ranks

__all__ = ["ranks", "variables"]
