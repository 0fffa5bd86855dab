"""Evaluation: the loss and metrics of a batch in eval mode, as sums over its samples.

Batches need not divide by the ranks: every sample still counts once. The samples that divide are
evaluated as they are. The others are cut into pieces whose size divides the number of ranks. Each
piece is repeated until each rank has one sample of it, and its sums are divided by the number of
copies. All such pieces have the same shape, and so run the same program.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core.errors import AxonDistError, ConfigError, did_you_mean
from ..core.modules import wrap_calls
from ..core.tree import shape_key, shapes_of
from ..core.typing import Array, Batch, Function, LossFn, PyTree
from ..core.weighted import Count, Shared, Weighted
from ..ops.linear_loss import BEFORE_HEAD
from ..parallel import mark_experts_per_sample
from ..separability.abstract_values import Dependence, same_scale
from .batch import Placed, samples_of
from .global_view import global_forward
from .model_changes import change_layers
from .objective import (
    Forward,
    ModelChange,
    Outcome,
    PartLoss,
    is_one,
    mean_loss,
    weighted_metrics,
    wide_pair,
)
from .plan import StepPlan
from .sample_traces import Traces
from .spec import StepSpec

LINEN_EVAL_ATTRIBUTES: MappingProxyType[type[nn.Module], str] = MappingProxyType(
    {
        nn.Dropout: "deterministic",
        nn.MultiHeadDotProductAttention: "deterministic",
        nn.BatchNorm: "use_running_average",
    }
)
"""Linen layers that behave differently in training -> the attribute that is True in eval mode."""


MODEL_EVAL_ARGUMENTS: MappingProxyType[str, bool] = MappingProxyType(
    {"deterministic": True, "train": False, "training": False, "is_training": False}
)
"""Argument that Linen models switch to evaluation with -> its value in evaluation."""


AVERAGED = (Dependence.MEAN, Dependence.CONSTANT)
"""The kinds of metrics whose value for several batches is their mean over the samples."""


@dataclasses.dataclass(frozen=True)
class WithArguments:
    """Wraps calls of a module, replacing some of the arguments.

    Args:
        names: the positional parameters of the method in order, without the module.
        arguments: the new values, by name.
    """

    names: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]

    def __call__(
        self, call: Function, module: nnx.Module | nn.Module, *args: object, **kwargs: object
    ) -> Any:
        """Runs the method; a call of another method of a bridged module is left unchanged."""
        if kwargs.get("method") is not None:
            return call(module, *args, **kwargs)
        arguments = dict(self.arguments)
        names = [*self.names[: len(args)], *[""] * (len(args) - len(self.names))]
        placed = [arguments.pop(name, x) for name, x in zip(names, args, strict=True)]
        return call(module, *placed, **{**kwargs, **arguments})


def _call_in_eval_mode(call: Function, module: nnx.Module, *args: object, **kwargs: object) -> Any:
    """Calls a bridged Linen module with its layers in eval mode, as `nnx.Module.eval` would."""
    with nn.intercept_methods(_intercept_eval_mode):
        return call(module, *args, **kwargs)


def evaluation(
    plan: StepPlan, kinds: MetricKinds, params: PyTree, buffers: PyTree, placed: Placed
) -> dict[str, Weighted]:
    """Computes the loss and metrics of a batch in eval mode, with the program of training.

    NNX modules are switched by `eval()`, which a bridged Linen module lacks. Calls of its Linen
    layers are intercepted and run in eval mode. If its call takes one of `MODEL_EVAL_ARGUMENTS`,
    that argument is set to its value in evaluation.

    Args:
        plan: the plan of the step.
        kinds: how its metrics depend on the samples.
        params: of the model, trained and frozen.
        buffers: of the model, with the `Shared` leaves of the batch.
        placed: a batch whose arrays are `[B, ...]`.

    Returns:
        `loss` and the metrics of the loss function; see `summed`.
    """
    spec = plan.spec
    set_eval_mode = in_eval_mode(spec)

    def first(model: nnx.Module) -> None:
        set_eval_mode(model)
        change_layers(spec.strategy, spec.world.mesh, model)

    batch = placed.arrays
    outcome = global_forward(plan, first)(params, buffers, batch)
    has_plain = any(not isinstance(x, Weighted) for x in outcome.metrics.values())
    return summed(outcome, batch, kinds.of(batch, placed.shared) if has_plain else {})


def in_eval_mode(spec: StepSpec) -> ModelChange:
    """Returns a function that sets a merged model to eval mode in place; see `evaluation`."""
    kwargs = dict(spec.options.eval_kwargs or {})

    def change(model: nnx.Module) -> None:
        model.eval()
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.bridge.ToNNX):
                _set_linen_eval_mode(module)
        for method in ("__call__", BEFORE_HEAD):
            if kwargs and hasattr(model, method):
                wrap_calls(model, {method: _with_arguments(model, method, kwargs)})

    return change


class MetricKinds:
    """How the metrics of an evaluation depend on the samples, as far as it is known.

    It is read from the program of the loss in eval mode, traced for two numbers of samples. They do
    not depend on the batch, because the last of a validation is shorter. For the same reason they
    are small only if the loss takes no more: `jnp.sum(each) / max(len(each), 8)` is a sum for few
    samples alone.

    Args:
        plan: the plan of the step.
    """

    def __init__(self, plan: StepPlan):
        self._plan = plan
        self._found: dict[Hashable, dict[str, Dependence]] = {}

    def of(self, batch: Batch, shared: PyTree) -> dict[str, Dependence]:
        """Returns the kind of each metric; {} if the loss cannot be traced for these numbers.

        Args:
            batch: leaves of shape [B, ...], arrays or shapes; B does not matter.
            shared: the `Shared` leaves of the batch; {} for nothing.
        """
        samples = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
        key = shape_key((samples, shapes_of(shared)))
        if key not in self._found:
            self._found[key] = self._read(shapes_of(batch), self._plan.with_shared(shared))
        return self._found[key]

    def _read(self, batch: Batch, plan: StepPlan) -> dict[str, Dependence]:
        spec = plan.spec
        set_eval_mode = in_eval_mode(spec)

        def first(model: nnx.Module) -> None:
            set_eval_mode(model)
            mark_experts_per_sample(model)

        change = plan.changes.change_with(None, first)
        traces = Traces(spec.model_spec, spec.loss_fn, change, over_all=False)
        for samples in (math.lcm(64, spec.num_ranks), max(spec.num_ranks, 2)):
            try:
                dependence = traces.dependence(batch, (samples, 2 * samples))
            except Exception:  # The user's loss may raise anything for another number of samples.
                continue
            if not dependence.failure:
                return {name: output.kind for name, output in dependence.metrics.items()}
        return {}


def summed(outcome: Outcome, batch: Batch, kinds: Mapping[str, Dependence]) -> dict[str, Weighted]:
    """Returns the loss and metrics of a batch as sums over its samples, with their weights.

    A plain scalar loss, and a metric that is a mean over the samples or a constant, has their
    number as its weight. A sum of integers over them is a `Count`. Any other metric without a
    weight, such as a maximum or a sum of floats, has that of the loss.

    Args:
        outcome: of the loss function for the batch.
        batch: leaves of shape [B, ...].
        kinds: how the metrics depend on the samples, as far as it is known.
    """
    size = jnp.float32(samples_of(batch))
    if is_one(outcome.loss.weight):
        outcome = dataclasses.replace(outcome, loss=Weighted(outcome.loss.total * size, size))
    loss = wide_pair(outcome.loss)
    of_kind = {}
    for name, x in outcome.metrics.items():
        if isinstance(x, Weighted):
            continue
        is_integer = jnp.issubdtype(jnp.result_type(x), jnp.integer)
        if is_integer and kinds.get(name) is Dependence.SUM:
            of_kind[name] = Count(jnp.asarray(x), jnp.ones(()))
        elif kinds.get(name) in AVERAGED:
            of_kind[name] = wide_pair(Weighted(x * size, size))
    others = {
        name: x if isinstance(x, Weighted) else Weighted(x, loss.weight)
        for name, x in weighted_metrics(outcome).items()
    }
    return {"loss": loss} | others | of_kind


def _set_linen_eval_mode(module: nnx.bridge.ToNNX) -> None:
    """Sets one bridged Linen module to eval mode, in place."""
    names = _names(module)
    switches = tuple((name, value) for name, value in MODEL_EVAL_ARGUMENTS.items() if name in names)
    wrap_calls(module, {"__call__": _call_in_eval_mode})
    if switches:
        wrap_calls(module, {"__call__": WithArguments(names, switches)})


def check_eval_kwargs(model: nnx.Module, kwargs: Mapping[str, Any]) -> None:
    """Raises unless the model's call takes these arguments.

    Args:
        model: any; its leaves may be shapes.
        kwargs: the arguments, by name.

    Raises:
        ConfigError: naming the unknown argument and those that the call takes.
    """
    parameters = _parameters(model)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in kwargs:
        if name not in parameters:
            kind = type(_called(model)).__name__
            raise ConfigError(
                f"eval_kwargs has {name!r}, but the call of {kind} takes "
                f"{', '.join(parameters) or 'no arguments'}.{did_you_mean(name, parameters)}",
                code="eval-kwargs",
            )


def _called(module: nnx.Module) -> Any:
    return module.to_nnx__module if isinstance(module, nnx.bridge.ToNNX) else module


def means(sums: Mapping[str, Weighted]) -> dict[str, Array]:
    """Divides sums over samples by their weights, except `Count`s.

    Args:
        sums: by name, from `evaluation`; those of several batches can be added up.

    Returns:
        total / weight, by name; the total of a `Count`.
    """
    return {
        name: jnp.asarray(x.total) if isinstance(x, Count) else mean_loss(x)
        for name, x in sums.items()
    }


def _with_arguments(module: nnx.Module, method: str, kwargs: Mapping[str, Any]) -> WithArguments:
    """Wraps a method with the arguments that it accepts; `check_eval_kwargs` checked `__call__`."""
    parameters = _parameters(module, method)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = tuple((name, x) for name, x in kwargs.items() if takes_any or name in parameters)
    return WithArguments(_names(module, method), accepted)


def _parameters(module: nnx.Module, method: str = "__call__") -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(type(_called(module)), method)).parameters
    return {name: parameters[name] for name in list(parameters)[1:]}


def _names(module: nnx.Module, method: str = "__call__") -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = _parameters(module, method)
    return tuple(name for name, p in parameters.items() if p.kind in positional)


def _intercept_eval_mode(
    call: Function, args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Runs one method of a Linen module, with eval mode set if the module has a training mode."""
    name = next(
        (n for kind, n in LINEN_EVAL_ATTRIBUTES.items() if isinstance(context.module, kind)), None
    )
    if name is None or context.method_name != "__call__":
        return call(*args, **kwargs)
    names = tuple(inspect.signature(type(context.module).__call__).parameters)[1:]
    with _attribute_unset(context.module, name):
        run = WithArguments(names, ((name, True),))
        return run(lambda _, *a, **k: call(*a, **k), context.module, *args, **kwargs)


@contextmanager
def _attribute_unset(module: nn.Module, name: str) -> Iterator[None]:
    """Sets an attribute to None for a while: Linen refuses it as attribute and argument at once."""
    before = getattr(module, name)
    object.__setattr__(module, name, None)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)


@dataclasses.dataclass(frozen=True)
class EvalPiece:
    """Some samples of a batch, repeated so that they divide over the ranks.

    Args:
        start: the first sample.
        stop: the one after the last.
        copies: how many times the samples occur.
    """

    start: int
    stop: int
    copies: int = 1

    @property
    def samples(self) -> int:
        """The number of samples that are evaluated, copies included."""
        return (self.stop - self.start) * self.copies

    def of(self, batch: Batch, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Cuts the samples of the piece out of a batch.

        Args:
            batch: leaves of shape [B, ...], arrays, or `Shared`.
            rows: which samples of the piece to take, copies included.
        """

        def cut(leaf):
            if isinstance(leaf, Shared):
                return leaf
            numpy = jnp if isinstance(leaf, jax.Array) else np
            part = numpy.asarray(leaf)[self.start : self.stop]
            return numpy.concatenate([part] * self.copies)[rows]

        return jax.tree.map(cut, batch)

    def without_copies(self, sums: dict[str, Weighted]) -> dict[str, Weighted]:
        """Returns the sums over the samples of the piece, with each sample counted once."""
        return jax.tree.map(lambda x: x / self.copies, sums) if self.copies > 1 else sums


def pieces(samples: int, ranks: int) -> list[EvalPiece]:
    """Cuts a batch into pieces that divide over the ranks.

    Args:
        samples: the number of samples of the batch.
        ranks: the number of ranks that split the samples.

    Example:
        >>> [(piece.start, piece.stop, piece.copies) for piece in pieces(13, 8)]
        [(0, 8, 1), (8, 12, 2), (12, 13, 8)]
    """
    start = samples // ranks * ranks
    found = [EvalPiece(0, start)] if start else []
    divisors = [size for size in range(ranks - 1, 0, -1) if ranks % size == 0]
    while start < samples:
        size = next(size for size in divisors if size <= samples - start)
        found.append(EvalPiece(start, start + size, ranks // size))
        start += size
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _EvaluationSums(PartLoss):
    """A loss function that returns the sums of an evaluation as metrics.

    Args:
        loss_fn: the user's loss.
        kinds: how its metrics depend on the samples.
    """

    loss_fn: LossFn
    kinds: Mapping[str, Dependence]

    def outcome(
        self, forward: Forward, params: PyTree, buffers: PyTree, batch: Batch
    ) -> tuple[Outcome, object]:
        outcome = forward(params, buffers, batch)
        sums = {}
        for name, value in summed(outcome, batch, self.kinds).items():
            # The weight of a `Count` does not grow with the samples, so the batch counts as one
            # that does not add up: the sum of its copies may exceed the range of its integers.
            sums[f"{name} total"] = value.total
            sums[f"{name} weight"] = value.weight
        return Outcome(Weighted(jnp.zeros(()), 1.0), sums, outcome.buffers), None


def adds_up(plan: StepPlan, kinds: Mapping[str, Dependence], batch: Batch) -> bool:
    """Returns whether every number of an evaluation is a sum of contributions of single samples.

    Reads it from the program of the loss in eval mode, traced for as many samples as there are
    ranks but at least two, for twice as many, and for as many as the largest piece of the batch
    has: a loss may depend on the number of its samples, such as `jnp.sum(each) / min(len(each),
    8)`. It is also traced for one sample more than the fewest: a loss of pairs of neighbors adds up
    only over parts of an even size. The result is False for a loss that compares samples, and for a
    loss that is a sum over the samples rather than a mean.

    Args:
        plan: the plan of the step.
        kinds: how its metrics depend on the samples, as far as it is known.
        batch: leaves of shape [B, ...], arrays or shapes.
    """
    spec = plan.spec
    least = max(spec.num_ranks, 2)
    largest = samples_of(batch) // least * least
    change = plan.changes.change_with(None, in_eval_mode(spec))
    sums: Any = _EvaluationSums(spec.loss_fn, kinds)
    traces = Traces(spec.model_spec, sums, change, over_all=False)
    sizes = [(least, whole) for whole in dict.fromkeys((2 * least, largest)) if whole > least]
    # `least` and `least + 1` have no common divisor, so a loss of groups of samples adds up over
    # parts of one of these sizes at most. The number of ranks divides neither size of this pair, so
    # a sharding constraint on the samples has the same effect in both.
    other = least + 1
    sizes.append((other, other * (3 if least == 2 else 2)))
    return all(_adds_up_between(traces, batch, part, whole) for part, whole in sizes)


def _adds_up_between(traces: Traces, batch: Batch, part: int, whole: int) -> bool:
    """Whether the sums over `whole` samples are those of their parts of `part` samples, added."""
    try:
        dependence = traces.dependence(shapes_of(batch), (part, whole))
    except AxonDistError:
        return False
    return not dependence.failure and all(
        output.is_separable and same_scale(output.factor, whole / part)
        for output in dependence.metrics.values()
    )


def added(parts: Sequence[dict[str, Weighted]]) -> dict[str, Weighted]:
    """Adds up the sums of several pieces on the devices."""
    return jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *parts)
