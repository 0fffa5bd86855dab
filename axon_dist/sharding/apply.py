"""Policies applied to trees: shardings of parameters, and of the optimizer state beside them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..core.tree import leaves_with_paths, map_with_path, path_str
from ..core.typing import PyTree
from .policy import Decision, HasShape, Policy


def specs(policy: Policy, tree: PyTree, mesh: Mesh) -> PyTree:
    """The PartitionSpec of every leaf of a tree.

    Args:
        policy: decides by path, shape and mesh.
        tree: arrays or `ShapeDtypeStruct`s.
        mesh: the mesh whose axes the specs name.

    Returns:
        The same tree with a `PartitionSpec` at every leaf.
    """
    return map_with_path(lambda path, leaf: policy(path, tuple(leaf.shape), mesh), tree)


def shardings(policy: Policy, tree: PyTree, mesh: Mesh, memory_kind: str | None = None) -> PyTree:
    """The NamedSharding of every leaf of a tree.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> from axon_dist.sharding import Replicate
        >>> mesh = World.emulate(8).mesh
        >>> shardings(Replicate(), {"w": jnp.ones((8, 4))}, mesh)["w"].spec
        P()
    """
    return map_with_path(
        lambda path, leaf: NamedSharding(
            mesh, policy(path, tuple(leaf.shape), mesh), memory_kind=memory_kind
        ),
        tree,
    )


def optimizer_shardings(
    policy: Policy, params: PyTree, opt_state: PyTree, mesh: Mesh, memory_kind: str | None = None
) -> PyTree:
    """The shardings of an optax state: moments lie as their parameter would under the policy.

    Args:
        policy: the policy of the optimizer state.
        params: the parameters, arrays or `ShapeDtypeStruct`s.
        opt_state: `jax.eval_shape(tx.init, params)`, or the state itself.
        mesh: names and sizes of its axes, over all devices.
        memory_kind: where the moments live; None is the device.

    Returns:
        A tree like `opt_state` with a `NamedSharding` at every leaf.
    """
    return jax.tree.map(
        lambda decision: NamedSharding(mesh, decision.spec, memory_kind=memory_kind),
        optimizer_decisions(policy, params, opt_state, mesh),
    )


def optimizer_decisions(
    policy: Policy, params: PyTree, opt_state: PyTree, mesh: HasShape
) -> PyTree:
    """What a policy decides about every leaf of an optax state.

    A leaf belongs to a parameter when its path ends with the parameter's path and the shapes
    agree, and lies as the parameter would. Matching by path holds for masked and partitioned
    transformations too, where `optax.tree_map_params` fails. What belongs to no parameter, such as
    factored or flattened moments, is split by the part of the policy that looks at no path.

    Args:
        policy: the policy of the optimizer state.
        params: the parameters, arrays or `ShapeDtypeStruct`s.
        opt_state: `jax.eval_shape(tx.init, params)`, or the state itself.
        mesh: anything with named axes.

    Returns:
        A tree like `opt_state` with a `Decision` at every leaf.
    """
    keys = {
        tuple(map(str, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    paths = dict(zip(keys, (path for path, _ in leaves_with_paths(params)), strict=True))

    def of_leaf(key_path: tuple[Any, ...], leaf: Any) -> Decision:
        suffixes = (tuple(map(str, key_path[start:])) for start in range(len(key_path)))
        for suffix in suffixes:
            parameter = keys.get(suffix)
            if parameter is not None and parameter.shape == leaf.shape:
                return policy.decide(paths[suffix], tuple(leaf.shape), mesh)
        return policy.flexible_part.decide(path_str(key_path), tuple(leaf.shape), mesh)

    return jax.tree_util.tree_map_with_path(of_leaf, opt_state)
