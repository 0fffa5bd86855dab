"""Leaves of equal units as the rows of one array, as a scan over layers reads and makes them.

A model that keeps its layers in a list has an array for each of them; the loop that runs them wants
one for all. Carried from microbatch to microbatch as a list, weights and sums would lie in memory
twice. Stacked and taken apart again they are the same array to the compiler.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import jax.numpy as jnp

from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Path, PyTree
from ..program import is_inside


@dataclasses.dataclass(frozen=True)
class Stacking:
    """Which leaves of a tree become the rows of one array.

    Args:
        rows: for each array the paths of its rows; a leaf of its own stands alone.
        like: a tree of the structure of those that are stacked.
    """

    rows: tuple[tuple[Path, ...], ...]
    like: PyTree

    def stack(self, tree: PyTree) -> dict[Path, Array]:
        """The arrays, by the path of their first row."""
        leaves = dict(leaves_with_paths(tree))
        alone = lambda paths: leaves[paths[0]]
        together = lambda paths: jnp.stack([leaves[path] for path in paths])
        return {paths[0]: (together if paths[1:] else alone)(paths) for paths in self.rows}

    def unstack(self, stacked: dict[Path, Array]) -> PyTree:
        """The tree that they were made of; the inverse of `stack`."""
        leaves = {
            path: stacked[paths[0]][row] if paths[1:] else stacked[path]
            for paths in self.rows
            for row, path in enumerate(paths)
        }
        return map_with_path(lambda path, _: leaves[path], self.like)


def stacking_of(shapes: PyTree, units: Iterable[Path]) -> Stacking:
    """Stacks the leaves that equal units next to each other have under one name.

    Args:
        shapes: nested dict of `ShapeDtypeStruct`.
        units: the paths of the units.

    Returns:
        The stacking; what is no unit's, or what a unit has alone, stands alone.

    Example:
        >>> leaf = jnp.ones(2)
        >>> shapes = {"layers": {"2": {"w": leaf}, "10": {"w": leaf}}, "head": leaf}
        >>> stacking_of(shapes, ["layers/10", "layers/2"]).rows
        (('head',), ('layers/2/w', 'layers/10/w'))
    """
    found: dict[tuple, list[Path]] = {}
    inside = sorted(units, key=_counted)
    for path, leaf in leaves_with_paths(shapes):
        unit = next((unit for unit in inside if is_inside(path, unit)), None)
        kind = (path,)
        if unit is not None and re.search(r"\d", unit):
            name = re.sub(r"\d+", "#", unit) + path.removeprefix(unit)
            kind = (name, tuple(leaf.shape), str(leaf.dtype))
        found.setdefault(kind, []).append(path)
    return Stacking(tuple(tuple(sorted(paths, key=_counted)) for paths in found.values()), shapes)


def _counted(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts `layers/2` before `layers/10`."""
    parts = re.split(r"(\d+)", path)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
