"""Traces of a user's loss, one per number of samples, and how the loss depends on the samples.

`Traces.dependence` runs the analysis of `separability/` on two of them: that of a part of a batch
and that of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Hashable, Iterable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from ..core.compat import outside_meshes
from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import leaves_with_paths, shape_key
from ..core.typing import Array, Batch, LossFn, PyTree
from ..core.weighted import Weighted
from ..ir.walk import inputs_with_gradient
from ..separability.abstract_values import (
    Dependence,
    LossDependence,
    OutputDependence,
    Why,
    dependence_of,
)
from ..separability.interpret import RANKS, follow_samples
from .model_spec import ModelSpec
from .objective import ModelChange, PartLoss, evaluate, forward_of, is_one
from .statistics import has_statistics, synchronise_statistics

ALONE = "cannot be computed from"
"""Starts the reason given for a loss that raises for fewer samples."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced loss of a number of samples.

    Args:
        program: (params, buffers, batch) -> total and weight of the loss, total and weight of each
            metric, buffers.
        names: of the metrics.
        is_plain: whether the loss is a number without a weight.
        ending: completes the outputs of a `PartLoss`.
        axes: the names and sizes of the axes over which the program sums.
    """

    program: ClosedJaxpr
    names: tuple[str, ...]
    is_plain: bool
    ending: Any = None
    axes: tuple[tuple[str, int], ...] = ()

    def total_of(self, name: str) -> int:
        """Returns the index of the output that is the total of a metric."""
        return 2 + 2 * self.names.index(name)

    def inputs_with_gradient(self, output: int, count: int) -> list[int]:
        """Returns those of the first `count` inputs that an output has a gradient for."""
        return inputs_with_gradient(self.program, output, count, self.axes)


class Traces:
    """Traces the programs of a loss, one per number of samples, and keeps them.

    With `over_all`, the traced program averages statistics of BatchNorm over all parts, so that
    they do not count as a coupling of samples, and experts count the tokens of all parts. A step
    averages over ranks only: each microbatch has statistics of its own, of which the step warns.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        change: changes the merged model before the loss runs.
        over_all: whether statistics are averaged over all parts, rather than each part having its
            own.

    Attributes:
        change: the argument `change`.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        loss_fn: LossFn,
        change: ModelChange | None = None,
        over_all: bool = True,
    ):
        self._model_spec = model_spec
        self._loss_fn = loss_fn
        self.change = change
        self._over_all = over_all and has_statistics(model_spec.abstract)
        self._traced: dict[Hashable, Traced] = {}

    def of(self, batch: Batch, samples: int, others: Iterable[Traces] = ()) -> Traced:
        """Returns the loss of a number of samples, tracing it on first use.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: how many.
            others: if one of these has traced the program already, it is used.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype), batch
        )
        key = shape_key(shapes)
        for traces in (*others, self):
            if key in traces._traced:
                return traces._traced[key]
        self._traced[key] = self._trace(shapes)
        return self._traced[key]

    def _over_ranks(self, model: nnx.Module) -> None:
        """Changes a model whose statistics are averaged over all parts."""
        if self.change is not None:
            self.change(model)
        synchronise_statistics(model, (RANKS,))

    def _trace(self, batch: Batch) -> Traced:
        """Traces the loss; see `Traced`."""
        # Filled while `run` is traced.
        details: dict[str, Any] = {}
        change = self._over_ranks if self._over_all else self.change

        def run(params: PyTree, buffers: PyTree, batch: Batch) -> list[Any]:
            inputs = (params, buffers, batch)
            loss_fn = self._loss_fn
            ending = None
            if isinstance(loss_fn, PartLoss):
                forward = forward_of(self._model_spec, loss_fn.loss_fn, change)
                outcome, ending = loss_fn.outcome(forward, *inputs)
            else:
                outcome = evaluate(self._model_spec, loss_fn, *inputs, change)
            names = tuple(sorted(outcome.metrics))
            is_plain = is_one(outcome.loss.weight)
            details.update(names=names, is_plain=is_plain, ending=ending)
            numbers = scalars([outcome.loss, *(outcome.metrics[name] for name in names)])
            return [*numbers, *jax.tree.leaves(outcome.buffers)]

        axes = ((RANKS, 2),) if self._over_all else ()
        # With the axis, tracing is outside of meshes: no mesh has this axis. Without it, tracing
        # keeps the mesh of the step, under which the step may run the equations of an `Ending`.
        with outside_meshes() if self._over_all else nullcontext():
            program = jax.make_jaxpr(run, axis_env=axes)(*self._model_spec.arguments, batch)
        return Traced(program, **details, axes=axes)

    def dependence(
        self, batch: Batch, sizes: tuple[int, int], zeros: Container[int] = ()
    ) -> LossDependence:
        """Analyses the traced programs for how the loss depends on the samples of its batch.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            sizes: the numbers of samples of a part and of the whole; the latter is a multiple of
                the former.
            zeros: the indices of the program inputs that are taken as 0.

        Returns:
            How the loss, the metrics and the buffers depend on the samples.

        Raises:
            UnsupportedError: when the weight of the loss depends on a trained parameter.
        """
        model_spec = self._model_spec
        full = self.of(batch, sizes[1])
        paths = [path for path, _ in leaves_with_paths(model_spec.weights)]
        read = () if full.is_plain else full.inputs_with_gradient(1, len(paths))
        if trained := [paths[at] for at in read if paths[at] not in model_spec.frozen_paths]:
            # The weights of all parts are summed before anything is divided, so the gradient treats
            # them as constants. They may read parameters where no gradient flows.
            raise UnsupportedError(
                f"the weight of the loss depends on the parameter {trained[0]!r}; in "
                "Weighted(total, weight) the weight must depend on the batch alone, such as the "
                "number of its tokens, or the parameter must be frozen, or wrapped in "
                "jax.lax.stop_gradient",
                code="weight-of-parameters",
            )
        try:
            part = self.of(batch, sizes[0])
        except AxonDistError:
            raise
        except Exception as error:  # The user's loss may raise anything for fewer samples.
            why = f"{ALONE} {sizes[0]} samples alone: {str(error)[:200]}"
            lost = OutputDependence(Dependence.COUPLED, why=why)
            return LossDependence(lost, {}, {}, failure=str(error) or why)
        if (part.names, part.is_plain) != (full.names, full.is_plain):
            return LossDependence(OutputDependence(Dependence.COUPLED, why=Why.DIFFERS), {}, {})
        programs = {sizes[0]: part.program, sizes[1]: full.program}
        values = follow_samples(programs.__getitem__, sizes, len(jax.tree.leaves(batch)), zeros)
        total, weight, *rest = values
        metrics = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(part.names)}
        buffers = [path for path, _ in leaves_with_paths(model_spec.arguments[1])]
        changed = dict(zip(buffers, rest[2 * len(part.names) :], strict=True))
        return dependence_of(total, weight, metrics, changed, part.is_plain, sizes[1] / sizes[0])


def scalars(numbers: Iterable[Any], weight: float = 1.0) -> list[Array]:
    """Returns total and weight of each number in turn; a plain number has weight `weight`."""
    pairs = [x if isinstance(x, Weighted) else Weighted(x, weight) for x in numbers]
    return [jnp.asarray(x) for pair in pairs for x in (pair.total, pair.weight)]
