"""A table of tokens whose rows are split over a mesh axis, and the head that shares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.reduction import all_sum
from ..core.told import COUNT, RNGS, told
from ..core.typing import Array
from ..mesh import ProcessGroup
from .linear import Initializer, born, check_divides, is_manual, pinned, split_axis
from .mode import ParallelMode

TABLE_INIT: Initializer = nnx.initializers.normal(0.02)


class VocabParallelEmbedding(nnx.Module):
    """Looks tokens up in a table `[num_embeddings, features]` whose rows are split.

    Every rank looks up the tokens whose rows it holds, and one sum over the ranks completes the
    others. `attend` uses the table as a head and leaves the logits split.

    Args:
        num_embeddings: size of the vocabulary.
        features: size of a row.
        group: the ranks that split the rows; None leaves the split to a strategy.
        dtype: dtype of the rows given; None is the table's.
        param_dtype: dtype of the table.
        embedding_init: fills the whole table, so that it does not depend on the number of ranks.
        rngs: source of the initial weights.

    Raises:
        DivisibilityError: when the rows do not divide over the group.

    Example:
        >>> table = VocabParallelEmbedding(8, 4, rngs=nnx.Rngs(0))
        >>> table(jnp.array([[1, 2, 3]])).shape
        (1, 3, 4)
    """

    mode = ParallelMode.VOCAB

    @told("VocabParallelEmbedding", num_embeddings=COUNT, features=COUNT, rngs=RNGS)
    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        group: ProcessGroup | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Initializer = TABLE_INIT,
        rngs: nnx.Rngs,
    ):
        check_divides("num_embeddings", num_embeddings, group)
        shape = (num_embeddings, features)
        self.embedding: Any = nnx.Param(born(embedding_init, rngs, shape, param_dtype, group, 0))
        self.num_embeddings: Any = num_embeddings
        self.features: Any = features
        self.group: Any = group
        self.dtype: Any = dtype
        self.param_dtype: Any = param_dtype

    def __call__(self, tokens: Array) -> Array:
        """Maps tokens `[...]` to their rows `[..., features]`, whole on every rank."""
        table = self.embedding[...].astype(self.dtype or self.param_dtype)
        axis = split_axis(self.group)
        if axis is not None and is_manual(axis):
            return all_sum(own_rows(lambda ids: table[ids], tokens, len(table), axis), axis)
        return pinned(jnp.take(table, tokens, axis=0), self.group, None)

    def attend(self, x: Array) -> Array:
        """Maps `[..., features]` to logits `[..., num_embeddings]`, split over the group."""
        table = self.embedding[...].astype(self.dtype or self.param_dtype)
        return pinned(x @ table.T, self.group, -1)


def own_rows(look_up: Callable[[Array], Array], tokens: Array, num_rows: int, axis: str) -> Array:
    """This rank's rows of a lookup and zeros elsewhere, inside `shard_map`.

    Args:
        look_up: maps positions in this rank's part of the table to rows.
        tokens: ids in the whole table.
        num_rows: how many rows this rank holds.
        axis: the mesh axis that splits the rows.

    Returns:
        The rank's addend: the sum over the ranks is the lookup.
    """
    local = tokens - jax.lax.axis_index(axis) * num_rows
    is_mine = (local >= 0) & (local < num_rows)
    rows = look_up(jnp.clip(local, 0, num_rows - 1))
    return jnp.where(is_mine[..., None], rows, jnp.zeros((), rows.dtype))
