"""The old name of `axon_dist.train.cli`."""
