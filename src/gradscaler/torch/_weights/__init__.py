"""The parts of :class:`~gradscaler.torch.MasterWeights`."""
