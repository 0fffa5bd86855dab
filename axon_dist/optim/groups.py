"""Which parameters an optimizer treats otherwise: weight decay on matrices, and groups by path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import optax

from ..core.tree import map_with_path
from ..core.typing import PyTree

_UNDECAYED = re.compile(r"(bias|scale|embedding|positions?)$")
_OTHERWISE = "*"
"""A label that is no regular expression."""


def matrices(params: PyTree) -> PyTree:
    """A mask for `optax.adamw(mask=...)`: no norm, bias, embedding or position decays.

    A parameter decays unless it has fewer than two dims or its name ends in `bias`, `scale`,
    `embedding` or `positions`, as Flax names them; in stacked blocks these have two dims.

    Args:
        params: a nested dict.

    Example:
        >>> import jax.numpy as jnp
        >>> matrices({"kernel": jnp.ones((2, 2)), "bias": jnp.ones((4, 2))})
        {'bias': False, 'kernel': True}
    """
    return map_with_path(lambda path, x: x.ndim > 1 and not _UNDECAYED.search(path), params)


def by_path(
    groups: Mapping[str, optax.GradientTransformation], otherwise: optax.GradientTransformation
) -> optax.GradientTransformation:
    """An optimizer for each group of parameters: `optax.partition` by patterns of paths.

    Args:
        groups: regular expressions, searched for in paths such as `blocks/0/mlp/up/kernel`; of
            several that are found, the first counts. `optax.set_to_zero()` freezes a group, though
            `build_train_step(trainable=...)` saves its gradients and moments, too.
        otherwise: what trains all others.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = by_path({"head": optax.sgd(0.1)}, optax.sgd(1.0))
        >>> ones = {"head": jnp.ones(()), "body": jnp.ones(())}
        >>> updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
        >>> float(updates["body"]), round(float(updates["head"]), 2)
        (-1.0, -0.1)
    """

    def labels(params: PyTree) -> PyTree:
        return map_with_path(lambda path, _: first_match(groups, path) or _OTHERWISE, params)

    return optax.partition({**groups, _OTHERWISE: otherwise}, labels)


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """The first of some regular expressions that is found in a path; None where none is."""
    return next((pattern for pattern in patterns if re.search(pattern, path)), None)
