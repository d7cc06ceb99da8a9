"""Code that the adapters of Keras 3 and Keras 2 share. It imports neither."""
