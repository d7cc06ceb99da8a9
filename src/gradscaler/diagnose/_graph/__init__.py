"""Read the graph of a loss of PyTorch: its nodes, the tensors they keep, their lines and places."""
