from keras_like import variables
from processes import ranks

__all__ = ["ranks", "variables"]
