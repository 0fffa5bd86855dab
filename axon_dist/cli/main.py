"""The old name of `axon_dist.train.cli.main`."""

from ..core.lazy import moved

__getattr__ = moved(__name__, "axon_dist.train.cli.main")
