from tests.support.keras_like import family, variables

__all__ = ["family", "variables"]
