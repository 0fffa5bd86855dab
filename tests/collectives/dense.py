"""Groups of each kind, and collectives inside shard_map with their gradients."""

import jax
from jax.sharding import PartitionSpec

GROUPS = {
    "one of two axes": lambda world: world.group("tp"),
    "both axes": lambda world: world.group("dp", "tp"),
    "list of ranks": lambda world: world.new_group([5, 0, 2]),
}


def in_shard_map(function, mesh, check_vma, *, replicated=False):
    """Runs a per-rank function over the rows of an array, all axes manual.

    The result is the stack of the rows; replicated, one value that JAX must find equal on all.
    """
    rows = PartitionSpec(mesh.axis_names)

    def body(x):
        y = function(jax.tree.map(lambda leaf: leaf[0], x))
        return y if replicated else jax.tree.map(lambda leaf: leaf[None], y)

    out = PartitionSpec() if replicated else rows
    mapped = jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=out, check_vma=check_vma)
    return jax.jit(mapped)


def value_and_vjp(function, x, cotangent):
    """The value of a function, and its transpose applied to a cotangent."""

    def both(x, cotangent):
        y, vjp = jax.vjp(function, x)
        return y, vjp(cotangent)[0]

    return jax.jit(both)(x, cotangent)
