"""The old name of `axon_dist.train.loop`."""

from .core.lazy import moved

__getattr__ = moved(__name__, "axon_dist.train.loop", "axon_dist.train")
