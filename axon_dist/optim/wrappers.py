"""Optimizers that wrap others: groups of parameters by path, spikes to skip, norms by layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.errors import ConfigError
from ..core.renamed import renamed_arguments
from ..core.tree import leaves_with_paths, map_with_path, wide
from ..core.typing import Array, PyTree

_UNDECAYED = re.compile(r"(bias|scale|embedding|positions?)$")
_OTHERWISE = "*"
"""The label of all other parameters; not a valid regular expression, so no group has it."""


def decayed(params: PyTree) -> PyTree:
    """A mask for `optax.adamw(mask=...)`: norms, biases, embeddings and positions do not decay.

    A parameter decays unless it has fewer than two dims or its name ends in `bias`, `scale`,
    `embedding` or `positions`, as in Flax. The names matter because in stacked blocks even biases
    have two dims.

    Args:
        params: a nested dict.

    Example:
        >>> import jax.numpy as jnp
        >>> decayed({"kernel": jnp.ones((2, 2)), "bias": jnp.ones((4, 2))})
        {'bias': False, 'kernel': True}
    """
    return map_with_path(lambda path, x: x.ndim > 1 and not _UNDECAYED.search(path), params)


def by_path(
    groups: Mapping[str, optax.GradientTransformation], otherwise: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Uses one optimizer per group of parameters: `optax.partition` by patterns of paths.

    Args:
        groups: optimizers by regular expression, searched for in paths such as
            `blocks/0/mlp/up/kernel`; the first match counts. `optax.set_to_zero()` freezes a group,
            but `build_train_step(trainable=...)` also avoids its gradients and moments.
        otherwise: the optimizer of all other parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = by_path({"head": optax.sgd(0.1)}, optax.sgd(1.0))
        >>> ones = {"head": jnp.ones(()), "body": jnp.ones(())}
        >>> updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
        >>> float(updates["body"]), round(float(updates["head"]), 2)
        (-1.0, -0.1)
    """

    return by_label(
        groups, otherwise, lambda path: next((p for p in groups if re.search(p, path)), None)
    )


def by_label(
    groups: Mapping[str, optax.GradientTransformation],
    otherwise: optax.GradientTransformation,
    label: Callable[[str], str | None],
) -> optax.GradientTransformation:
    """Uses one optimizer per group of parameters; a function gives the group of each parameter.

    Args:
        groups: optimizers by label; labels are part of the paths in the optimizer's state.
        otherwise: the optimizer of all other parameters.
        label: maps the path of a parameter to the label of its group, or to None.
    """

    def labelled(path: str, _: object) -> str:
        found = label(path)
        return _OTHERWISE if found is None else found

    return optax.partition({**groups, _OTHERWISE: otherwise}, lambda p: map_with_path(labelled, p))


SPIKE = "spike"
"""The metric that is 1 if a step was skipped as a spike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spikes:
    """Skips steps whose loss or gradient norm is an outlier.

    Args:
        deviations: a step is skipped if its loss, or the norm of its gradient, exceeds the mean of
            the last steps by more than this many standard deviations. The norm is taken before any
            `clip_norm` if `watched` is the outermost optimizer. Inside another one, such as
            `optax.chain` or `optax.partition`, it is taken after the `clip_norm` of
            `build_train_step`, and before its own.
        window: mean and deviation are running averages over about this many steps; the first
            `window` steps are never skipped.
    """

    deviations: float = 6.0
    window: int = 100

    def validate(self) -> None:
        """Raises `ConfigError` unless both are in range."""
        if not self.deviations > 0 or self.window < 2:
            raise ConfigError(
                f"got deviations={self.deviations} and window={self.window}; deviations must be "
                "above 0, and window at least 2 steps",
                code="spikes-range",
            )


class Average(NamedTuple):
    """Mean and variance of a number over the last steps."""

    mean: Array
    variance: Array


class Watched(NamedTuple):
    """The state of `watched`: optimizer state, averages, and the metrics of the last step."""

    inner: PyTree
    steps: Array
    averages: dict[str, Average]
    metrics: dict[str, Array]


@renamed_arguments(layer_norms="norms_by_layer")
def watched(
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float | None = None,
    spikes: Spikes | None = None,
    norms_by_layer: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: skips spikes, and reports the norms of every layer.

    A skipped step changes neither parameters nor moments, nor the step count of a learning-rate
    schedule; a `Trainer` counts it. A spike enters the averages as the largest value that would not
    have been skipped, so the averages eventually catch up with a loss that stays higher.
    `build_train_step` adds `metrics` of the state to those of the step.

    Args:
        optimizer: the optimizer that updates the parameters.
        clip_norm: clips gradients to this norm after their norms are measured; None does not clip.
            Prefer that of `build_train_step`. It clips before the optimizer sees the gradient and
            passes on the norm from before, and a norm that overflows makes its step nonfinite.
        spikes: which steps are skipped; None skips none.
        norms_by_layer: whether to report `grad_norm/L`, `param_norm/L` and `update_norm/L` of every
            layer L: a block such as `blocks/0`, or else the first part of the path. The update of a
            spike is measured as it would have been; `metrics` of `build_train_step` measure it as
            it is, 0.

    Returns:
        The wrapped optimizer. With `spikes`, its `update` needs the loss as `value`, and takes as
        `norm` that of the gradient before it was clipped; without it, it measures the norm.

    Raises:
        ConfigError: if `spikes` or `clip_norm` is out of range.

    Example:
        >>> optimizer, params = watched(optax.sgd(1.0), norms_by_layer=True), {"w": jnp.ones(4)}
        >>> _, state = optimizer.update(params, optimizer.init(params), params, value=0.0)
        >>> {name: float(norm) for name, norm in state.metrics.items()}
        {'grad_norm/w': 2.0, 'param_norm/w': 2.0, 'update_norm/w': 2.0}
    """
    if spikes is not None:
        spikes.validate()
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(
            f"clip_norm is {clip_norm}; it must be positive, or None not to clip",
            code="clip-norm-range",
        )
    # The state of a chain of one has the paths that checkpoints of earlier versions have.
    inner_optimizer = optax.with_extra_args_support(optax.chain(optimizer))

    def norms(**trees: PyTree) -> dict[str, Array]:
        metrics: dict[str, Array] = {}
        if norms_by_layer:
            for name, tree in trees.items():
                metrics |= {f"{name}_norm/{x}": norm for x, norm in layer_norms(tree).items()}
        if spikes is not None:
            metrics[SPIKE] = jnp.zeros(())
        return metrics

    def init(params: PyTree) -> Watched:
        start = Average(jnp.zeros(()), jnp.zeros(()))
        averages = {} if spikes is None else {"loss": start, "norm": start}
        zeros = jax.tree.map(jnp.zeros_like, norms(grad=params, param=params, update=params))
        return Watched(inner_optimizer.init(params), jnp.zeros((), jnp.int32), averages, zeros)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        value: Any = None,
        norm: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, Watched]:
        # Clipping has no state, so whether it is asked for does not change the paths of the state.
        clipped = updates if clip_norm is None else _clipped(updates, clip_norm)
        changes, inner = inner_optimizer.update(clipped, state.inner, params, value=value, **extra)
        metrics = norms(grad=updates, param=params, update=changes)
        averages = state.averages
        if spikes is not None:
            if norm is None:
                norm = optax.tree.norm(jax.tree.map(wide, updates))
            observed = {"loss": value, "norm": norm}
            skips, averages = _detect_spikes(spikes, state, observed)
            changes = jax.tree.map(lambda u: jnp.where(skips, jnp.zeros_like(u), u), changes)
            inner = jax.tree.map(lambda n, o: jnp.where(skips, o, n), inner, state.inner)
            metrics[SPIKE] = skips.astype(jnp.float32)
        return changes, Watched(inner, state.steps + 1, averages, metrics)

    return optax.GradientTransformationExtraArgs(init, update)


def takes_norm(state: PyTree) -> bool:
    """Whether an optimizer with this state takes the norm of the gradient as `norm`.

    Only an outermost `watched` is known to take it: what is around another one may not pass it on.
    """
    return isinstance(state, Watched) and bool(state.averages)


def _clipped(updates: PyTree, max_norm: float) -> PyTree:
    """Clips by the global norm, which is summed in float32 or wider."""
    clip = optax.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(jax.tree.map(wide, updates), clip.init(updates))
    return jax.tree.map(lambda c, u: c.astype(u.dtype), clipped, updates)


def _detect_spikes(
    spikes: Spikes, state: Watched, observed: dict[str, Array]
) -> tuple[Array, dict[str, Average]]:
    """Returns whether the step is skipped, and the updated averages."""
    share = jnp.maximum(1 / (state.steps + 1), 1 / spikes.window).astype(jnp.float32)
    skips = jnp.zeros((), bool)
    averages = {}
    for name, number in observed.items():
        number = number.astype(jnp.float32)
        mean, variance = state.averages[name]
        limit = mean + spikes.deviations * jnp.sqrt(variance)
        # `~(<=)` rather than `>`, so that NaN is a spike too.
        is_spike = (state.steps >= spikes.window) & ~(number <= limit)
        deviation = jnp.where(is_spike, limit, number) - mean
        is_known = jnp.isfinite(deviation)
        updated_variance = (1 - share) * (variance + share * deviation * deviation)
        updated = Average(mean + share * deviation, updated_variance)
        averages[name] = jax.tree.map(
            lambda n, o, known=is_known: jnp.where(known, n, o), updated, state.averages[name]
        )
        skips = skips | is_spike
    return skips, averages


def layer_of(path: str) -> str:
    """Returns the layer of a parameter: its block, or the first part of its path.

    Example:
        >>> layer_of("blocks/0/mlp/up/kernel"), layer_of("head/kernel")
        ('blocks/0', 'head')
    """
    keys = path.split("/")
    first = next((n for n, key in enumerate(keys) if key.isdigit()), 0)
    return "/".join(keys[: first + 1])


def layer_norms(tree: PyTree) -> dict[str, Array]:
    """Returns the norm of every layer of a nested dict, summed in float32 or wider.

    Example:
        >>> {k: float(v) for k, v in layer_norms({"head": {"kernel": jnp.full(4, 2.0)}}).items()}
        {'head': 4.0}
    """
    squares: dict[str, Array] = {}
    for path, leaf in leaves_with_paths(tree):
        leaf = wide(leaf)
        # The conjugate keeps the imaginary part; of a real number it is the number itself.
        square = jnp.sum((leaf.conj() * leaf).real)
        squares[layer_of(path)] = squares.get(layer_of(path), jnp.zeros(())) + square
    return {layer: jnp.sqrt(square) for layer, square in squares.items()}
