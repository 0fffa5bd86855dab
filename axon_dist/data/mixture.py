"""Several sources of samples as one, each with its share."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

from axon_dist.core.errors import ConfigError

from .samples import LocalBatch, TokenSamples, checksum, shuffled

_FILL = {"segments": 1, "mask": 1}
"""What an array is where a source has none: one document, every token of which is a target."""


class Mixture:
    """Samples of several sources, so many of each as its weight says in every stretch of the run.

    Which source sample `g` of a run is of, and which of its samples it is, depends on `g`, the
    weights and the seed alone. Each source has its own epochs: one that is small for its weight
    comes around more often.

    Args:
        parts: the sources, of one length.
        weights: their shares, above 0, in any unit.

    Raises:
        ConfigError: when a weight is missing or not above 0.
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float]):
        if len(parts) != len(weights) or not parts or min(weights) <= 0:
            raise ConfigError(
                f"data.weights: got {list(weights)} for {len(parts)} sources, which must be a "
                "number above 0 for each; write as many"
            )
        self._parts = parts
        self._shares = np.array(weights, float) / sum(weights)
        sizes = [part.identity["num_samples"] for part in parts]
        self._starts = np.cumsum([0, *sizes])
        self.vocab_size: int = max(part.vocab_size for part in parts)
        self.show = parts[0].show
        self.padding: float = float(
            sum((s * p.padding for s, p in zip(self._shares, parts, strict=True)))
        )
        self.description: str = " + ".join(
            f"{100 * share:.3g} % of ({part.description})"
            for share, part in zip(self._shares, parts, strict=True)
        )

    @property
    def identity(self) -> dict[str, int]:
        """What all parts are, and their shares."""
        parts = [part.identity for part in self._parts]
        sums = np.array([part["contents"] for part in parts])
        return {
            "length": parts[0]["length"],
            "num_samples": int(self._starts[-1]),
            "contents": checksum(sums, self._shares),
        }

    def order(self, seed: int) -> grain.MapDataset[int]:
        """Each part shuffled by itself, epoch for epoch, and all dealt out by their shares.

        Args:
            seed: of the order.
        """
        parts = []
        for number, part in enumerate(self._parts):
            start = int(self._starts[number])
            # Parts of one size would otherwise be shuffled alike.
            part_seed = (seed + number * 0x9E3779B9) % 2**32
            order = shuffled(part.identity["num_samples"], part_seed)
            parts.append(order.map(lambda sample, start=start: start + sample))
        return grain.MapDataset.mix(parts, self._shares.tolist())

    def train(self, numbers: np.ndarray) -> LocalBatch:
        """Takes training samples of the parts that they are of."""
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = [
            self._parts[part].train(np.array([number - self._starts[part]]))
            for part, number in zip(which.tolist(), numbers.tolist(), strict=True)
        ]
        return self._together(rows)

    @property
    def num_validation(self) -> int:
        """So many that no part gives one twice."""
        counts = [part.num_validation for part in self._parts]
        return max(1, int((np.array(counts) / self._shares).min()))

    def spread(self, count: int) -> np.ndarray:
        """Part and place of samples of the validations, by the same shares, `[count, 2]`."""
        order = grain.MapDataset.mix(
            [grain.MapDataset.source([n]).repeat() for n in range(len(self._parts))],
            self._shares.tolist(),
        )
        which = np.array([order[g] for g in range(count)])
        places = np.zeros(count, np.int64)
        for number, part in enumerate(self._parts):
            if chosen := int((which == number).sum()):
                places[which == number] = part.spread(chosen)
        return np.stack([which, places], axis=1)

    def validation(self, places: np.ndarray) -> LocalBatch:
        """Takes validation samples of the parts."""
        return self._together(
            [self._parts[p].validation(np.array([place])) for p, place in places.tolist()]
        )

    def _together(self, rows: list[LocalBatch]) -> LocalBatch:
        names = [name for name in ("tokens", "segments", "mask") if any(name in r for r in rows)]
        return {name: np.concatenate([_filled(row, name) for row in rows]) for name in names}


def _filled(row: LocalBatch, name: str) -> np.ndarray:
    if name in row:
        return row[name]
    dtype = np.int8 if name == "mask" else np.int32
    return np.full(row["tokens"].shape, _FILL[name], dtype)
