"""Replicas that train on their own and meet every H steps: local SGD and DiLoCo over slow links."""

from __future__ import annotations

import optax

from ..collectives import Compression, compression_of
from ..core.errors import ConfigError
from ..core.told import COUNT, OPTIMIZER, TEXT
from .plans import SlowPlan
from .strategy import Strategy


def diloco(
    axis: str = "nodes",
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    compress: Compression | str | None = None,
    fragments: int = 1,
) -> Strategy:
    """Replicas over a slow axis that train on their own and meet every H steps.

    The batch is split over the axis too, and each replica takes H steps of the step's optimizer on
    its share, sending nothing over the axis. Then the mean of how far they went is a gradient for
    the outer optimizer, whose parameters they all go on from. Their moments stay their own. With
    H=1, plain SGD inside and `optax.sgd(1.0)` outside this is data parallelism, for losses whose
    weight is the same in every share.

    Args:
        axis: the mesh axis between the replicas, such as `nodes` or `pods`. Other strategies,
            composed with this one, split each replica over the other axes.
        every: H, the steps between two meetings.
        outer: the outer optimizer; None takes that of the paper,
            `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        compress: `"int8"`, `"fp8"` or `"top_k"`, or a `Quantized` or `TopK` with other settings;
            what a replica leaves unsaid it adds the next time (error feedback).
        fragments: parts of the parameters that meet at steps of their own, as in streaming DiLoCo.

    Returns:
        The strategy.

    Raises:
        ConfigError: when H or the number of fragments is no whole number from 1, there are more
            fragments than steps, or the outer optimizer or compression is none.

    Example:
        >>> plan = diloco("nodes", every=100).slow
        >>> plan.axis, plan.every
        ('nodes', 100)

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; fragments: Streaming DiLoCo,
    arXiv:2501.18512.
    """
    return _slow("diloco", axis, every, outer, compress, fragments)


def local_sgd(
    axis: str = "nodes",
    *,
    every: int,
    compress: Compression | str | None = None,
    fragments: int = 1,
) -> Strategy:
    """Replicas over a slow axis whose parameters are averaged every H steps.

    As `diloco` with `optax.sgd(1.0)` outside: `θ_r = mean_r θ_r`.

    Args:
        axis: the mesh axis between the replicas.
        every: H, the steps between two averages.
        compress: as for `diloco`.
        fragments: as for `diloco`.

    Returns:
        The strategy.

    Raises:
        ConfigError: as for `diloco`.

    Example:
        >>> local_sgd("nodes", every=8).batch_axes
        ('nodes',)

    Source: Stich, Local SGD, arXiv:1805.09767.
    """
    return _slow("local_sgd", axis, every, optax.sgd(1.0), compress, fragments)


def _slow(
    name: str,
    axis: str,
    every: int,
    outer: optax.GradientTransformation | None,
    compress: Compression | str | None,
    fragments: int,
) -> Strategy:
    TEXT.check(name, "axis", axis)
    COUNT.check(name, "every", every)
    COUNT.check(name, "fragments", fragments)
    OPTIMIZER.or_none().check(name, "outer", outer)
    if fragments > every:
        raise ConfigError(
            f"{name} got fragments={fragments} and every={every}; each fragment meets at a step of "
            f"its own, so give at most {every} fragments, or more steps"
        )
    chosen = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    plan = SlowPlan(
        axis,
        int(every),
        optax.with_extra_args_support(chosen),
        compression_of(compress),
        int(fragments),
    )
    return Strategy(name, batch_axes=(axis,), slow=plan)
