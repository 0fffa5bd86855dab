"""Whether an optimizer may see the blocks of a pipeline stacked in rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import optax

from ..core.errors import UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import PyTree
from ..parallel.pipeline import ModelStorage, cut, depends_on


def check_rowwise(optimizer: optax.GradientTransformation, storage: ModelStorage) -> None:
    """Raises unless an optimizer treats every element of a row as it would treat it in the model.

    Rows have a dim more than the blocks they hold. An optimizer that works element by element does
    not notice; one that takes the norm of each leaf, or decays only leaves of two dims, would
    train differently. So the update of each leaf is traced in both forms, and has to be made of
    the same operations.

    Args:
        optimizer: the transformation.
        storage: the stored form of the parameters.

    Raises:
        UnsupportedError: naming the parameter that would be treated differently.
    """
    stored = jax.eval_shape(storage.from_model, storage.shapes)
    in_model = _recipes(optimizer, storage.shapes)
    in_rows = _recipes(optimizer, stored)
    for path, row in storage.homes_by_path.items():
        if in_model[path] != in_rows[row] or in_model[path] is None:
            raise UnsupportedError(
                f"the optimizer treats {path!r} by its shape, or as a whole, and a pipeline keeps "
                f"it stacked with those of other stages. Use an optimizer that works element by "
                "element, and masks that decide by path instead of by the number of dims"
            )


def _recipes(optimizer: optax.GradientTransformation, params: PyTree) -> dict[str, Any]:
    """For each leaf, the operations on arrays of its size that make its update.

    None where it is reduced for itself alone; a norm over all gradients is the same in any form.
    """
    state = jax.eval_shape(optimizer.init, params)
    make = lambda grads, state, params: optimizer.update(grads, state, params)[0]
    jaxpr = jax.make_jaxpr(make)(params, state, params).jaxpr
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
        operations = Counter(
            str(e.params.get("name", e.primitive.name)) for e, v in made if _is_size(v, size)
        )
        found[path] = None if alone else operations
    return found


def _is_size(variable: Any, size: int) -> bool:
    return math.prod(variable.aval.shape) == size
