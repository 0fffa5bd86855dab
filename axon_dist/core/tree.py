"""Paths, kinds and sizes of the leaves of a pytree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from .typing import Path, PyTree


def path_str(key_path: tuple[Any, ...]) -> Path:
    """Spells a JAX key path as names joined by slashes.

    Args:
        key_path: what `jax.tree_util.tree_leaves_with_path` gives beside each leaf.

    Returns:
        A path such as `"blocks/0/kernel"`.

    Example:
        >>> [(path, leaf)] = leaves_with_paths({"blocks": [{"kernel": 1.0}]})
        >>> path
        'blocks/0/kernel'
    """
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def leaves_with_paths(tree: PyTree) -> list[tuple[Path, Any]]:
    """Lists the leaves of a tree with their paths, in the order of `jax.tree.leaves`."""
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def map_with_path(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps `function(path, leaf, *rest_leaves)` over a tree, the path spelled with slashes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_str(path), *leaves), tree, *rest
    )


def is_key(leaf: Any) -> bool:
    """Whether a leaf is, or describes, an array of typed random keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def num_params(tree: PyTree) -> int:
    """Counts the elements of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
    """Counts the bytes of all leaves as if each were stored once, whole.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> num_bytes(jax.ShapeDtypeStruct((10, 5), jnp.float32))
        200
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
