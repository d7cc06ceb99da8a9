"""The scaler and the tensor operations that PyTorch and the ports of its API share."""
