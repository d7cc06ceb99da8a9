"""What Keras 3 and Keras 2 share, without importing either."""
