"""What PyTorch and the ports of its API share: scaler and tensor operations."""
