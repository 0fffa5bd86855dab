"""The error that lets a reader fall back to an older checkpoint."""

from __future__ import annotations

from ..core.errors import CheckpointError


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is unfinished, or is no longer what was written; another one may be good.

    A checkpoint that is whole but belongs to another model raises a plain `CheckpointError`: no
    older one would fit either.
    """
