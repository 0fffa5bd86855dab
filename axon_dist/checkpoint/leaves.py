"""A state as named arrays: random keys as their words, scalars as arrays, and back again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import CheckpointError
from ..core.tree import is_key, leaves_with_paths
from ..core.typing import Array, PyTree
from ..core.typing import Path as LeafPath


def named_leaves(tree: PyTree) -> dict[LeafPath, Any]:
    """The leaves of a tree by path.

    Raises:
        CheckpointError: when two leaves spell the same path.
    """
    pairs = leaves_with_paths(tree)
    leaves = dict(pairs)
    if len(leaves) < len(pairs):
        paths = [path for path, _ in pairs]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise CheckpointError(
            f"two leaves of the state have the path {twice!r}; rename a key that holds a slash"
        )
    return leaves


def as_array(path: LeafPath, leaf: Any) -> Array:
    """A leaf as a JAX array; numbers and numpy arrays are put on the default device.

    Raises:
        CheckpointError: when it is nothing that JAX makes an array of, or when JAX would change its
            dtype, as it does to int64 by default.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        array = jnp.asarray(leaf)
    except OverflowError as error:
        raise CheckpointError(
            f"leaf {path} of the state is the number {leaf}: {error}; keep it smaller, or set "
            "jax_enable_x64"
        ) from error
    except (TypeError, ValueError) as error:
        dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        raise CheckpointError(
            f"leaf {path} of the state is of type {type(leaf).__name__}{dtype}; only arrays, "
            "random keys and numbers can be saved: take it out of the state, or put it into meta"
        ) from error
    if isinstance(leaf, (np.ndarray, np.generic)) and array.dtype != leaf.dtype:
        raise CheckpointError(
            f"leaf {path} is a numpy {leaf.dtype}, which JAX would turn into {array.dtype}; "
            f"convert it, or set jax_enable_x64"
        )
    return array


def to_stored(leaf: Array) -> Array:
    """What is stored of a leaf: its values, or the words of its keys, [..., words] uint32."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def stored_target(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Describes what `to_stored` made of a leaf; keys keep their words on one device."""
    if not is_key(leaf):
        return leaf
    words = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def from_stored(stored: Array, target: jax.ShapeDtypeStruct) -> Array:
    """The inverse of `to_stored`, for a leaf that `target` describes."""
    return jax.random.wrap_key_data(stored, impl=_key_impl(target)) if is_key(target) else stored


def described(path: LeafPath, leaf: Any) -> jax.ShapeDtypeStruct:
    """What a leaf of a target asks for, with the sharding it has to say.

    Raises:
        CheckpointError: when it does not say where it shall live.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        raise CheckpointError(
            f"leaf {path} of the target is a {type(leaf).__name__} without a sharding; give "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...), as target_of makes them"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def target_of(abstract: PyTree, shardings: PyTree) -> PyTree:
    """Puts shapes and shardings together into what `load_checkpoint` restores onto.

    Args:
        abstract: arrays or `ShapeDtypeStruct`s, such as `step.abstract_state`.
        shardings: the same tree of shardings, such as `step.state_shardings`.

    Returns:
        The same tree of `ShapeDtypeStruct`s with shardings.

    Example:
        >>> from axon_dist.mesh import World
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> split = NamedSharding(World.emulate(8).mesh, PartitionSpec("dp"))
        >>> target_of({"w": jnp.zeros(16)}, {"w": split})["w"].sharding.shard_shape((16,))
        (2,)
    """
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )


def _key_impl(target: jax.ShapeDtypeStruct) -> Any:
    """The implementation of described keys, which only an array, or a tracer of one, tells."""
    found = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), target)
    return found[0]
