"""The old name of `axon_dist.train.config`."""

from .core.lazy import moved

__getattr__ = moved(__name__, "axon_dist.train.config", "axon_dist.train.app")
