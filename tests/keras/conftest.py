from keras_like import variables

__all__ = ["variables"]
