"""Batches that do not divide, filled up with samples that weigh nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError, UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Batch, PyTree
from ..program import sources_of
from .objective import evaluate, mean_metrics
from .parts import ModelParts
from .spec import StepSpec


class Padding:
    """Fills batches up, after a look at whether the loss really leaves the fillings out.

    The samples are spread evenly over the microbatches, 5 over 4 as 2, 1, 1 and 1. The last of each
    is repeated, so that no value is of a kind that the model never meets, and the weight of what is
    repeated is 0 in one leaf of the batch. A loss that sums `weight * loss` and returns
    `Weighted(that, sum of weight)` then has the value and the gradient of the samples that were
    given. Dropout draws as if the fillings were samples.

    Args:
        weight: the name of the leaf, of shape [B, ...]. Where the batch lacks it, it is made of
            ones, [B] in float32.
        spec: model, loss, optimizer, strategy, devices and options of the step.
    """

    def __init__(self, weight: str, spec: StepSpec):
        self._weight, self._spec = weight, spec
        self._checked: set[Any] = set()

    def fill(
        self, batch: Batch, multiple: int, num_microbatches: int = 1, shared: PyTree = None
    ) -> Batch:
        """Adds samples until they divide.

        Args:
            batch: a dict of leaves of shape [B, ...], arrays or shapes.
            multiple: what B is to divide by.
            num_microbatches: over how many equal parts the samples are spread; it divides
                `multiple`.
            shared: nested dict of what the batch has beside its samples; None for nothing.

        Returns:
            The batch with its weights, of the next multiple of samples.

        Raises:
            ConfigError: when the batch is not a dict, the loss is a plain mean, or it or a metric
                does not read the weights.
            UnsupportedError: when the model keeps statistics of the batch.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"got a batch of type {type(batch).__name__} with pad={self._weight!r}; padding "
                f"needs a dict, in which {self._weight!r} weighs the samples"
            )
        leaves = jax.tree.leaves(batch)
        rows = leaves[0].shape[0]
        filled = dict(batch)
        filled.setdefault(self._weight, _ones(rows, any(_is_shape(x) for x in leaves)))
        if rows % multiple:
            sources, is_own = spread(rows, rows + -rows % multiple, num_microbatches)
            filled = {
                name: jax.tree.map(
                    lambda x, n=name: _fill(x, sources, is_own if n == self._weight else None), part
                )
                for name, part in filled.items()
            }
        self._check(filled, shared or {})
        return filled

    def _check(self, batch: dict, shared: PyTree) -> None:
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        shapes, beside = jax.tree.map(shape, (batch, shared))
        key = tuple((path, x.shape, x.dtype) for path, x in leaves_with_paths((shapes, beside)))
        if key not in self._checked:
            self._look(shapes, self._spec.with_shared(beside).parts)
            self._checked.add(key)

    def _look(self, shapes: dict, parts: ModelParts) -> None:
        """Reads from the traced loss what depends on what."""
        for what, is_buffer, read in self._dependencies(shapes, parts):
            if is_buffer and read:
                raise UnsupportedError(
                    f"the buffer {what!r} depends on the batch, as the statistics of BatchNorm do, "
                    f"and would count the samples that pad={self._weight!r} adds. Use a "
                    "normalisation without statistics, or batches that divide"
                )
            if not is_buffer and self._weight not in read and (read or what == "loss"):
                raise ConfigError(
                    f"the {what} of loss_fn does not depend on batch[{self._weight!r}], so that "
                    f"the samples that pad={self._weight!r} adds would count. Multiply each sample "
                    "by its weight, and return Weighted(sum of weight * loss, sum of weight)"
                )

    def _dependencies(
        self, shapes: dict, parts: ModelParts
    ) -> Iterator[tuple[str, bool, set[str]]]:
        """What the loss function makes, whether it is a buffer, and which leaves it depends on."""
        names = ["loss", "weight"]

        def run(params: Any, buffers: Any, batch: Any) -> Any:
            outcome = evaluate(parts, self._spec.loss_fn, params, buffers, batch)
            if isinstance(outcome.loss.weight, (int, float)):
                raise ConfigError(
                    f"loss_fn returned a plain mean, which counts the samples that "
                    f"pad={self._weight!r} adds; return Weighted(sum of weight * loss, sum of "
                    f"weight) with the weights of batch[{self._weight!r}]"
                )
            names.extend(f"metric {name!r}" for name in sorted(outcome.metrics))
            loss = jnp.asarray(outcome.loss.total), jnp.asarray(outcome.loss.weight)
            return *loss, mean_metrics(outcome), outcome.buffers

        jaxpr = jax.make_jaxpr(run)(*parts.arguments, shapes).jaxpr
        outputs = [(name, False) for name in names]
        outputs += [(path, True) for path, _ in leaves_with_paths(parts.arguments[1])]
        tops = [path.split("/")[0] for path, _ in leaves_with_paths(shapes)]
        inputs = [*[""] * len(jax.tree.leaves(parts.arguments)), *tops]
        for (name, is_buffer), sources in zip(outputs, sources_of(jaxpr), strict=True):
            yield name, is_buffer, {inputs[source] for source in sources} - {""}


def spread(rows: int, total: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Which sample stands in each place of equal parts, and whether it stands there for itself.

    Args:
        rows: samples.
        total: places, at least as many.
        parts: how many; they divide the places.

    Returns:
        The samples of the places, and flags, each of shape [total].

    Example:
        >>> sources, is_own = spread(5, 8, 4)
        >>> sources.tolist(), is_own.astype(int).tolist()
        ([0, 1, 2, 2, 3, 3, 4, 4], [1, 1, 1, 0, 1, 0, 1, 0])
    """
    counts = np.full(parts, rows // parts) + (np.arange(parts) < rows % parts)
    ends = np.cumsum(counts)[:, None]
    places = (ends - counts[:, None]) + np.arange(total // parts)
    is_own = places < ends
    return np.clip(places, 0, np.maximum(ends - 1, 0)).reshape(-1), is_own.reshape(-1)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _ones(rows: int, as_shape: bool) -> Any:
    if as_shape:
        return jax.ShapeDtypeStruct((rows,), jnp.float32)
    return np.ones(rows, np.float32)


def _fill(leaf: Any, sources: np.ndarray, is_own: np.ndarray | None) -> Any:
    """Takes the rows, or shapes of them, and sets those to zero that are not a sample's own."""
    shape = (len(sources), *leaf.shape[1:])
    if _is_shape(leaf):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    taken = leaf[sources]
    if is_own is None:
        return taken
    kept = is_own.reshape(-1, *(1,) * (leaf.ndim - 1))
    return taken * kept.astype(leaf.dtype)
