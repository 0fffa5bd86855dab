"""The programs of a loss function: traced once for each number of samples, and read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ..core.errors import AxonDistError, UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Batch, LossFn, Path, PyTree
from ..core.weighted import Weighted
from ..jaxpr.sample_values import OutputUse, SampleUse, Use, Why, use_of
from ..jaxpr.samples import RANKS, follow_samples
from ..jaxpr.walk import moves_with
from .buffers import has_statistics, synchronise_statistics
from .objective import PartLoss, Prepare, evaluate, forward_of
from .parts import ModelParts


@dataclasses.dataclass(frozen=True)
class Traced:
    """The loss of a number of samples.

    Args:
        program: (params, buffers, batch) -> total, weight, those of each metric, buffers.
        names: of the metrics.
        is_plain: whether the loss has no weight of its own.
        ending: what completes the numbers of a `PartLoss`.
    """

    program: ClosedJaxpr
    names: tuple[str, ...]
    is_plain: bool
    ending: Any = None

    def total_of(self, name: str) -> int:
        """Which output is the total of a metric."""
        return 2 + 2 * self.names.index(name)


class Traces:
    """The programs of a loss, each traced once for a number of samples.

    BatchNorm counts as one that averages its statistics over all parts, and experts as ones that
    count the tokens of all, as the views that split the batch have them do.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        adapt: changes the merged model first.
        over_all: whether statistics are averaged over all parts; else each part has its own.
    """

    def __init__(
        self,
        parts: ModelParts,
        loss_fn: LossFn,
        adapt: Prepare | None = None,
        over_all: bool = True,
    ):
        self._parts, self._loss_fn, self._adapt = parts, loss_fn, adapt
        self._over_all = over_all and has_statistics(parts.abstract)
        self._found: dict[Any, Traced] = {}

    def of(self, batch: Batch, samples: int) -> Traced:
        """The loss of so many samples.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            samples: how many.
        """
        key = self._key(batch, samples)
        if key not in self._found:
            structure, *kinds = key
            shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
            self._found[key] = self._traced(jax.tree.unflatten(structure, shapes))
        return self._found[key]

    def _traced(self, batch: Batch) -> Traced:
        """(params, buffers, batch) -> total, weight, those of each metric, buffers."""
        learned: dict[str, Any] = {}

        def prepare(model: nnx.Module) -> None:
            if self._adapt is not None:
                self._adapt(model)
            if self._over_all:
                synchronise_statistics(model, (RANKS,))

        def run(params: PyTree, buffers: PyTree, batch: Batch) -> list[Any]:
            given, loss_fn, ending = (params, buffers, batch), self._loss_fn, None
            if isinstance(loss_fn, PartLoss):
                own = forward_of(self._parts, loss_fn.loss_fn, prepare)
                outcome, ending = loss_fn.outcome(own, *given)
            else:
                outcome = evaluate(self._parts, loss_fn, *given, prepare)
            names = tuple(sorted(outcome.metrics))
            is_plain = isinstance(outcome.loss.weight, (int, float)) and outcome.loss.weight == 1
            learned.update(names=names, is_plain=is_plain, ending=ending)
            numbers = [outcome.loss, *(outcome.metrics[name] for name in names)]
            pairs = [x if isinstance(x, Weighted) else Weighted(x, 1.0) for x in numbers]
            scalars = [jnp.asarray(x) for pair in pairs for x in (pair.total, pair.weight)]
            return [*scalars, *jax.tree.leaves(outcome.buffers)]

        if self._over_all:
            whole, mesh = PartitionSpec(), AbstractMesh((2,), (RANKS,), axis_types=(AxisType.Auto,))
            run = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return Traced(jax.make_jaxpr(run)(*self._parts.arguments, batch), **learned)

    def _key(self, batch: Batch, samples: int) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(batch)
        return structure, *(((samples, *x.shape[1:]), x.dtype) for x in leaves)

    def has(self, batch: Batch, samples: int) -> bool:
        """Whether the loss of so many samples is traced."""
        return self._key(batch, samples) in self._found

    def use(self, batch: Batch, sizes: tuple[int, int]) -> SampleUse:
        """What the loss makes of the samples of its batch, read from its programs.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            sizes: the numbers of samples of a part and of the whole, the latter a multiple.

        Returns:
            What it is.
        """
        parts, whole = self._parts, self.of(batch, sizes[1])
        paths = [path for path, _ in leaves_with_paths(parts.weights)]
        _check_weight(whole.program, paths, parts.frozen_paths)
        try:
            part = self.of(batch, sizes[0])
        except AxonDistError:
            raise
        except Exception as error:  # Whatever the user's loss does with fewer samples.
            why = f"cannot be computed of {sizes[0]} samples alone: {str(error)[:200]}"
            lost = OutputUse(Use.COUPLED, why=why)
            return SampleUse(lost, {}, {}, failure=str(error) or why)
        if (part.names, part.is_plain) != (whole.names, whole.is_plain):
            return SampleUse(OutputUse(Use.COUPLED, why=Why.DIFFERS), {}, {})
        programs = {sizes[0]: part.program, sizes[1]: whole.program}
        values = follow_samples(programs.__getitem__, sizes, len(jax.tree.leaves(batch)))
        total, weight, *rest = values
        metrics = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(part.names)}
        buffers = [path for path, _ in leaves_with_paths(parts.arguments[1])]
        changed = dict(zip(buffers, rest[2 * len(part.names) :], strict=True))
        return use_of(total, weight, metrics, changed, part.is_plain, sizes[1] / sizes[0])


def _check_weight(program: Any, params: list[Path], frozen: frozenset[Path]) -> None:
    """Raises `UnsupportedError` if the second output, the weight, moves with a parameter.

    Weights of parts are added up before anything is divided, so they are held when the loss is
    differentiated. What no gradient goes through, as a count or `stop_gradient`, may read them.

    Args:
        program: the traced loss; its first inputs are the parameters.
        params: their paths.
        frozen: those of them that are not trained.
    """
    moving = moves_with(program, 1, len(params))
    found = [number for number in moving if params[number] not in frozen]
    if found:
        raise UnsupportedError(
            f"the weight of the loss depends on the parameter {params[found[0]]!r}; in "
            "Weighted(total, weight) the weight must follow from the batch alone, such as the "
            "number of its tokens, or go through jax.lax.stop_gradient"
        )
