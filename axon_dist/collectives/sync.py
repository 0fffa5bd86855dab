"""Averaging the gradients that every rank took of its own loss."""

from __future__ import annotations

import jax

from ..core.errors import GroupError
from ..core.reduction import all_sum
from ..core.typing import Array, PyTree
from ..mesh import ProcessGroup
from .place import each_leaf, has_varying_types
from .reduce import check_mean, mean_leaf


def sync_gradients(tree: PyTree, group: ProcessGroup) -> PyTree:
    """Averages gradients that every rank took of the loss over its own samples.

    With equal numbers of samples, the mean of the local gradients is the gradient of the mean
    loss over all of them: `grad = (1/N) sum_r grad_r`.

    Inside a `shard_map` with `check_vma=True`, JAX itself adds up the gradient with respect to a
    value that is the same on every rank, and types the sum as invariant. Averaging such a gradient
    again would leave it N times too large, so it is only divided by N. Either way the loss that is
    differentiated must be the rank's own, and not yet averaged over the group.

    Args:
        tree: a pytree of gradients: this rank's inside `shard_map`, rank-stacked ones outside.
        group: the ranks among which the samples are split, N of them.

    Returns:
        A pytree like `tree`.

    Raises:
        DTypeError: for integers.
        GroupError: for a group by ranks, when JAX has added the gradient up over all ranks.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> group = World.emulate(4).default_group
        >>> sync_gradients({"w": jnp.array([1.0, 2.0, 3.0, 4.0])}, group)["w"]
        Array([2.5, 2.5, 2.5, 2.5], dtype=float32)

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv:2006.15704.
    """
    return each_leaf(_averaged, tree, group)


def sync_gradient(g: Array, group: ProcessGroup) -> Array:
    """Averages one gradient over the group; see `sync_gradients`."""
    return sync_gradients(g, group)


def _averaged(g: Array, group: ProcessGroup) -> Array:
    check_mean(g)
    if not has_varying_types(group.axes[0]):
        return mean_leaf(g, group)
    pending = tuple(axis for axis in group.axes if axis in jax.typeof(g).mat.varying)
    if pending == group.axes:
        return mean_leaf(g, group)
    if group.members is not None:
        raise GroupError(
            f"got a gradient of shape {g.shape} that JAX has already added up over all ranks, so "
            f"that those of the group {group} cannot be told apart; differentiate with respect to "
            f"jax.lax.pcast(params, {group.axes}, to='varying'), or with check_vma=False"
        )
    return all_sum(g, pending) / group.size
