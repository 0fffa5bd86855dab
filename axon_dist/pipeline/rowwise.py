"""Whether an optimizer may see the blocks of a pipeline stacked in rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from ..core.compat import inner_programs
from ..core.errors import UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import PyTree
from ..program import cut, depends_on, opened
from .storage import ModelStorage

AXES = frozenset({"axis", "axes", "dimension", "dimensions", "permutation", "dimension_numbers"})
"""Parameters by which an operation knows the dims of an array."""


def check_rowwise(optimizer: optax.GradientTransformation, storage: ModelStorage) -> None:
    """Raises unless an optimizer treats every element of a row as it would treat it in the model.

    Rows have a dim more than the blocks they hold. An optimizer that works element by element does
    not notice; one that takes the norm of each leaf, or decays only leaves of two dims, would
    train differently. So the update of each leaf is traced in both forms, and has to be made of
    the same operations with the same constants, none of which knows a dim or draws at random.

    Args:
        optimizer: the transformation.
        storage: the stored form of the parameters.

    Raises:
        UnsupportedError: naming the parameter that would be treated differently.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    stored = jax.eval_shape(storage.from_model, storage.shapes)
    in_model = _recipes(optimizer, storage.shapes)
    in_rows = _recipes(optimizer, stored)
    for path, row in storage.homes_by_path.items():
        if in_model[path] != in_rows[row] or in_model[path] is None:
            raise UnsupportedError(
                f"the optimizer treats {path!r} by its shape, or as a whole, or in a branch that "
                "cannot be looked into, and a pipeline keeps it stacked with those of other "
                "stages. Use an optimizer that works element by element, masks that decide by "
                "path instead of by the number of dims and alike for all blocks of a row, and "
                "num_microbatches instead of optax.MultiSteps"
            )


def _recipes(optimizer: optax.GradientTransformationExtraArgs, params: PyTree) -> dict[str, Any]:
    """For each leaf, the operations on arrays of its size that make its update.

    None where it is reduced for itself alone, or differs from place to place; a norm over all
    gradients is the same in any form.
    """
    state = jax.eval_shape(optimizer.init, params)
    value = jnp.zeros(())
    make = lambda grads, state, params: optimizer.update(grads, state, params, value=value)[0]
    operands = params, state, params
    # A call has one name whatever it does, and ties leaves together that do not belong together.
    jaxpr = opened(jax.make_jaxpr(make)(*operands), jax.tree.leaves(operands)).jaxpr
    paths = [path for path, _ in leaves_with_paths(params)]
    count = len(paths)
    grads, own = jaxpr.invars[:count], jaxpr.invars[-count:]
    found: dict[str, Any] = {}
    for path, update, *sources in zip(paths, jaxpr.outvars, grads, own, strict=True):
        piece = cut(jaxpr, [update])
        mine = depends_on(jaxpr, sources)
        size = math.prod(update.aval.shape)
        made = [(e, v) for e in piece.equations for v in e.outvars if v in mine]
        reduces = any(math.prod(v.aval.shape) < size for _, v in made)
        alone = reduces and not piece.needs.issuperset(grads)
        alike = [e for e, v in made if _is_size(v, size)]
        placed = size > 1 and any(AXES & inner.params.keys() for inner in _within(alike, size))
        draws = any(_is_random(inner) for inner in _within(piece.equations, size))
        found[path] = None if alone or placed or draws else Counter(map(_spelled, alike))
    return found


def _within(equations: Iterable[Any], size: int) -> Iterator[Any]:
    """The equations that make arrays of a size, those in calls and branches too."""
    for equation in equations:
        if any(_is_size(v, size) for v in equation.outvars):
            yield equation
            for inner in inner_programs(equation):
                yield from _within(inner.eqns, size)


def _is_random(equation: Any) -> bool:
    return equation.primitive.name.startswith(("random_", "threefry"))


def _spelled(equation: Any) -> str:
    """An operation and its constants, such as a size that it divides by."""
    literals = [str(v.val) for v in equation.invars if isinstance(v, Literal)]
    return " ".join([str(equation.params.get("name", equation.primitive.name)), *literals])


def _is_size(variable: Any, size: int) -> bool:
    return math.prod(variable.aval.shape) == size
