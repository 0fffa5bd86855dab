"""`Source`: where the values of one parameter lie in files, and how a slice of it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from axon_dist.checkpoint import TensorEntry
from axon_dist.core.typing import Shape

from .form import Form

CHUNK = 64 * 2**20
"""The most bytes of a file that are in memory at a time, unless one row has more."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a parameter that is a part of a tensor.

    Args:
        entry: the tensor.
        form: its dims -> those of the parameter.
        row: of dim 0 of the parameter, which the tensor does not have; None where it has all dims.
        dim: the dim, of the tensor in its form, along which either is cut; None for all of both.
        start: where the part begins along it in the tensor.
        at: where it begins in the parameter.
        size: its length along it.
    """

    entry: TensorEntry
    form: Form = Form()
    row: int | None = None
    dim: int | None = None
    start: int = 0
    at: int = 0
    size: int = 0

    def fill(self, out: np.ndarray, index: Sequence[slice]) -> None:
        """Reads what a slice of the parameter has of this part.

        Args:
            out: the slice, to be written.
            index: of the parameter, with start and stop.
        """
        inner = list(index)
        if self.row is not None:
            rows = inner.pop(0)
            if not rows.start <= self.row < rows.stop:
                return
            out = out[self.row - rows.start, ...]
        if self.dim is not None:
            wanted = inner[self.dim]
            low, high = max(wanted.start, self.at), min(wanted.stop, self.at + self.size)
            if low >= high:
                return
            here = slice(low - wanted.start, high - wanted.start)
            out = out[(slice(None),) * self.dim + (here, ...)]
            shift = self.start - self.at
            inner[self.dim] = slice(low + shift, high + shift)
        self._copy(out, inner)

    def _copy(self, out: np.ndarray, index: list[slice]) -> None:
        """Copies chunk by chunk, each mapped for itself: a map keeps all that it touched."""
        if not index:
            out[...] = self.form.take(self.entry.open(), ())
            return
        along = self.form.leading
        first, last = index[along].start, index[along].stop
        length = self.form.shape_of(self.entry.shape)[along]
        step = max(1, CHUNK * length // max(1, self.entry.size))
        for low in range(first, last, step):
            high = min(last, low + step)
            index[along] = slice(low, high)
            here = (slice(None),) * along + (slice(low - first, high - first),)
            out[here] = self.form.take(self.entry.open(), index)


@dataclasses.dataclass(frozen=True)
class Source:
    """All parts of a parameter.

    Args:
        shape: of the parameter.
        dtype: of the parameter, to which values are converted.
        pieces: which make it up without gaps.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from axon_dist.checkpoint import list_tensors, write_tensors
        >>> path = Path(tempfile.mkdtemp(), "w.safetensors")
        >>> write_tensors(path, {"w": np.eye(2)}, [np.array([[1.0, 2.0], [3.0, 4.0]])])
        >>> turned = Piece(list_tensors(path)["w"], Form("out in -> in out"))
        >>> Source((2, 2), np.dtype("float32"), (turned,)).read((slice(0, 1), slice(None))).tolist()
        [[1.0, 3.0]]
    """

    shape: Shape
    dtype: np.dtype
    pieces: tuple[Piece, ...]

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Reads a slice into memory of its own; nothing else of the files stays there."""
        whole = [slice(*part.indices(n)[:2]) for part, n in zip(index, self.shape, strict=True)]
        out = np.empty([part.stop - part.start for part in whole], self.dtype)
        for piece in self.pieces:
            piece.fill(out, whole)
        return out
