"""The old place of the wrappers, which forwards to `axon_dist.wrappers` and warns."""

from ..core.lazy import moved

__getattr__ = moved(__name__, "axon_dist.parallel.memory", "axon_dist.wrappers")
