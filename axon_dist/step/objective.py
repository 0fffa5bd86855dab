"""Evaluates a loss function to a weighted mean, metrics and new buffers; and its gradients."""

from __future__ import annotations

import abc
import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import AxonDistError, ConfigError, UnsupportedError
from ..core.modules import check_parameters
from ..core.tree import combine, is_key, leaves_with_paths, map_with_path, wide
from ..core.typing import Array, Batch, Function, LossFn, Metrics, PyTree
from ..core.weighted import Count, Weighted, WithTerm
from .model_spec import MEAN_WEIGHT, SHARED, STEP, ModelSpec, split_inputs
from .options import FLAG, LOSS_SCALE, METRICS, NORMS_BY_LAYER, OVERFLOW


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one evaluation of the loss.

    Args:
        loss: a sum and the weight that it is divided by; a plain loss has weight 1.
        metrics: what the loss function reports: `Weighted`, or a number with the weight of the
            loss.
        buffers: the buffers after the forward pass.
    """

    loss: Weighted
    metrics: dict[str, Array | Weighted]
    buffers: PyTree


RESERVED = frozenset({*METRICS, LOSS_SCALE, OVERFLOW, FLAG}) - {NORMS_BY_LAYER}
"""Names of metrics that a step reports itself; `update.py` checks those of layers, too."""

ModelChange: TypeAlias = Callable[[nnx.Module], None]
"""Changes a merged model in place, for example to average statistics over mesh axes."""


Forward: TypeAlias = Callable[[PyTree, PyTree, Batch], Outcome]
"""(params, buffers, batch) -> the result of the loss function."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartLoss(abc.ABC):
    """A loss function that returns other outputs for a part of a batch than the user's loss."""

    loss_fn: LossFn

    @abc.abstractmethod
    def outcome(
        self, forward: Forward, params: PyTree, buffers: PyTree, batch: Batch
    ) -> tuple[Outcome, object]:
        """Evaluates a part with the user's `forward`; also returns what completes the outputs."""


def evaluate(
    model_spec: ModelSpec,
    loss_fn: LossFn,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
    change: ModelChange | None = None,
) -> Outcome:
    """Runs the user's loss function on a model merged from arrays.

    Args:
        model_spec: the structure of the model.
        loss_fn: `loss_fn(model, batch)`, or `loss_fn(model, batch, step=...)`.
        params: nested dict of arrays, trained and frozen.
        buffers: nested dict of arrays.
        batch: what the loss function takes.
        change: changes the merged model before it runs.

    Returns:
        The outcome; a plain scalar loss has weight 1.

    Raises:
        ConfigError: when the loss is not a floating-point scalar, the metrics are not a dict, or a
            metric has a name that the step uses itself.
    """
    if isinstance(loss_fn, PartLoss):
        inner = forward_of(model_spec, loss_fn.loss_fn, change)
        return loss_fn.outcome(inner, params, buffers, batch)[0]
    model = model_spec.merge(params, buffers)
    if change is not None:
        change(model)
    before = dict(leaves_with_paths(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    kwargs = {"step": buffers[STEP]} if STEP in buffers else {}
    shared = dict(buffers.get(SHARED, {}))
    mean_weight = shared.pop(MEAN_WEIGHT, None)
    samples = jax.tree.leaves(batch)[0].shape[0]
    batch = combine(batch, shared) if shared else batch
    returned = _call_loss(loss_fn, model, batch, kwargs)
    if isinstance(returned, tuple) and len(returned) != 2:
        raise ConfigError(
            f"loss_fn returned {len(returned)} values; it must return the loss, or the loss and a "
            "dict of scalar metrics"
        )
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if isinstance(loss, WithTerm):
        if mean_weight is not None:
            means = {name: metrics[name] * samples for name in loss.metrics}
            metrics = metrics | {n: Weighted(x, float(samples)) for n, x in means.items()}
            loss = loss.of_samples(samples, mean_weight)
        else:
            loss = Weighted(loss.total, loss.weight)
    weighted = loss if isinstance(loss, Weighted) else Weighted(loss, 1.0)
    _check_outputs(weighted, metrics)
    after = leaves_with_paths(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    check_parameters(model, before, after)
    return Outcome(weighted, dict(metrics), buffers_like(buffers, model))


def _check_outputs(loss: Weighted, metrics: Any) -> None:
    """Raises if the user's loss returned anything but scalars with their own names."""
    if not jnp.issubdtype(getattr(loss.total, "dtype", type(loss.total)), jnp.floating):
        raise ConfigError(
            f"loss_fn returned a loss of {_kind(loss.total)}; it must be a floating-point "
            "scalar, or Weighted(total, weight)"
        )
    _check_scalar("loss", loss.total)
    _check_scalar("weight", loss.weight)
    if not isinstance(metrics, dict):
        raise ConfigError(
            f"loss_fn returned metrics of type {type(metrics).__name__}; they must be a dict of "
            "scalars",
            code="metrics-not-a-dict",
        )
    if reserved := sorted(RESERVED & {name for name in metrics if isinstance(name, str)}):
        raise ConfigError(
            f"loss_fn returned metrics named {', '.join(reserved)}, which the step reports itself; "
            "give them other names, or leave them out"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"loss_fn returned a metric named {name!r:.80}, a {type(name).__name__}; names "
                "must be strings, as in {'accuracy': ...}",
                code="metric-name-not-a-string",
            )
        for part in (value.total, value.weight) if isinstance(value, Weighted) else (value,):
            _check_scalar(f"metric {name!r}", part)


def _call_loss(loss_fn: LossFn, model: nnx.Module, batch: Batch, kwargs: dict[str, Any]) -> Any:
    """Calls the user's loss, and adds the shapes of the batch to an error that it raises.

    Raises:
        ConfigError: when it looks up a key that the batch lacks, or a layer does not know whether
            it is in training mode.
    """
    # Under manual axes, ignore the logical activation axes that Linen models name.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    try:
        with nn.logical_axis_rules(()) if manual else nullcontext():
            return loss_fn(model, batch, **kwargs)
    except AxonDistError:
        raise
    except Exception as error:
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        if key is not None and _looks_up_in(batch, error) and key not in batch:
            raise ConfigError(
                f"loss_fn looks up {key!r}, but the batch has {_shapes(batch)}; give the batch "
                "what the loss reads, or correct the name"
            ) from error
        untold = "No `(deterministic|use_running_average)` argument was provided to \\w+"
        if match := re.match(untold, str(error)):
            raise ConfigError(
                f"{match[0]}. Say it in each layer, or call "
                "model.train() in the function that makes the model; validation switches to "
                "model.eval() by itself"
            ) from error
        ranks = f", on each rank of {', '.join(sorted(manual))}" if manual else ""
        error.add_note(f"{_origin(error)} for a batch of {_shapes(batch)}{ranks}")
        raise


_LIBRARIES = frozenset({"jax", "jaxlib", "flax", "numpy", "optax", "opt_einsum", "einops"})
"""Libraries that both user code and this package call."""

_CALLERS = ("axon_dist.parallel.", "axon_dist.pipeline.", "axon_dist.step.", "axon_dist.ir.")
"""The modules of this package that call methods of a model with their own arguments."""


def _origin(error: Exception) -> str:
    """Says what raised an error: the start of a note, which ends with `loss_fn(model, batch)`.

    The innermost frame outside `_LIBRARIES` and the standard library decides. A method of the
    user's may have been called by this package, with other arrays than the user's code gives it.
    """
    known = _LIBRARIES | sys.stdlib_module_names - {"__main__"}
    frames = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_qualname)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    # The first frame is that of `_call_loss`.
    names = [pair for pair in frames[1:] if pair[0].partition(".")[0] not in known]
    loss = "loss_fn(model, batch)"
    if not names or names[-1][0].startswith("axon_dist"):
        return f"while axon_dist traced {loss}"
    callers = [module for module, _ in names if module.startswith(_CALLERS)]
    if not callers:
        return f"raised by {loss}"
    return f"raised by {names[-1][1]}, which {callers[-1]} calls, within {loss}"


def _looks_up_in(batch: object, error: Exception) -> bool:
    """Whether the code that raised an error holds a batch, which is a mapping."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(batch, Mapping) and any(x is batch for x in frame.f_locals.values())


def buffers_like(before: PyTree, model: nnx.Module) -> PyTree:
    """Returns a model's buffers after a forward pass, with the paths and dtypes they had before.

    New variables, such as those that a module has sown, are dropped after the call. A statistic
    does not become wider because its inputs are.

    Raises:
        UnsupportedError: when casting a buffer back would lose more than precision.
    """
    after = dict(leaves_with_paths(nnx.to_pure_dict(nnx.state(model))))

    def keep(path, old):
        new = after[path]
        if is_key(old):
            return new
        if _loses(new.dtype, old.dtype):
            raise UnsupportedError(
                f"the buffer {path!r} is {old.dtype.name}, but {new.dtype.name} after a forward "
                "pass; a buffer keeps its dtype from step to step, which would change the value: "
                f"create it with the later dtype, such as jnp.zeros(shape, jnp.{new.dtype.name})",
                code="buffer-dtype-changes",
            )
        return new.astype(old.dtype)

    buffers, inputs = split_inputs(before)
    return map_with_path(keep, buffers) | inputs


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _loses(new: jnp.dtype, old: jnp.dtype) -> bool:
    """Whether a cast loses a count, a fraction or an imaginary part, and not only precision."""
    kind, before = ([jnp.issubdtype(x, k) for k in _KINDS].index(True) for x in (new, old))
    return kind > before or (kind == before == 1 and new.itemsize > old.itemsize)


class GradientArguments(NamedTuple):
    """The arguments of a gradient computation.

    Args:
        params: the trained parameters as the state holds them.
        frozen: the frozen parameters, which have no gradients.
        buffers: every Variable that is neither trained nor an `nnx.Param`: BatchStat, RngState,
            Cache, your own types.
        batch: placed leaves, `[B, ...]` or `[K, B/K, ...]`.
        scale: the loss scale, a scalar; None for 1.
    """

    params: PyTree
    frozen: PyTree
    buffers: PyTree
    batch: Batch
    scale: Array | None


class GradientResult(NamedTuple):
    """The result of a gradient computation.

    Args:
        grads: mean gradients, a tree like the parameters given.
        metrics: `loss`, and the metrics of the loss function; of replicas that train independently,
            what `shared_metrics` takes.
        buffers: the buffers after the batch.
        numbers: the same as `metrics`; but what has a weight is not divided by it.
    """

    grads: PyTree
    metrics: Metrics
    buffers: PyTree
    numbers: dict[str, Array | Weighted]


def is_one(weight: object) -> bool:
    """Whether a weight is the Python number 1, the weight of a plain mean, and not an array.

    Example:
        >>> is_one(1.0), is_one(jnp.ones(()))
        (True, False)
    """
    return isinstance(weight, (int, float)) and weight == 1


def mean_loss(loss: Weighted) -> Array:
    """Returns `total / weight`, or 0 if the weight is 0, as in a batch that is all padding."""
    if is_one(loss.weight):
        return jnp.asarray(loss.total)
    return jnp.where(jnp.asarray(loss.weight) == 0, 0, _quotient(loss))


def weighted_metrics(outcome: Outcome) -> dict[str, Array | Weighted]:
    """Returns metrics as weighted sums; a metric without a weight gets that of the loss.

    A `Count` gives its total without a weight, because the weights of all parts add up to 1. It is
    the only result of an integer dtype, by which it is known later.
    """
    weight = outcome.loss.weight

    def weigh(x: Array | Weighted) -> Any:
        if isinstance(x, Count):
            return jnp.asarray(x.total)
        if isinstance(x, Weighted):
            return wide_pair(x)
        if is_one(weight):
            return wide_number(x)
        pair = wide_pair(Weighted(x, weight))
        # A mean over no samples may be NaN, and must not make the sum over parts NaN.
        return jnp.where(pair.weight == 0, 0, pair.total * pair.weight)

    return {name: weigh(value) for name, value in outcome.metrics.items()}


def shard_metrics(outcome: Outcome, num_parts: int) -> dict[str, Array | Weighted]:
    """Returns the metrics of one of `num_parts` parts of a batch, ready to be added up.

    Those of a single part are not weighted. If they were, a metric would be 0 in a batch without
    weight, and an integer would become a float. So they are those of `gradient_means`, with two
    exceptions. A pipeline returns bools and half precision in float32. `Weighted(integer, 1)`
    becomes a float in a pipeline, because there its weight is an array.
    """
    if num_parts > 1:
        return weighted_metrics(outcome)
    return jax.tree.map(jnp.asarray, outcome.metrics)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Weighted sums over samples, which add up over microbatches and ranks.

    Args:
        grads: sum of weight x gradient of the mean loss, a tree like the parameters.
        loss: sum of the losses, and sum of the weights.
        metrics: sum of weight x metric; `Weighted` if the metric has its own weight; an integer if
            it is a count, which has none. Of a batch in one part, the metrics themselves.
    """

    grads: PyTree
    loss: Weighted
    metrics: dict[str, Array | Weighted]

    def __add__(self, other: Sums) -> Sums:
        return jax.tree.map(jnp.add, self, other)

    def result(self, buffers: PyTree, num_parts: int) -> GradientResult:
        """Divides by the weight; adds the buffers after the batch.

        Args:
            buffers: after the batch.
            num_parts: the number of parts that were added up, as `gradient_sums` takes it.
        """
        grads, metrics = self.means(num_parts)
        weighted = {name: x for name, x in self.metrics.items() if isinstance(x, Weighted)}
        return GradientResult(grads, metrics, buffers, metrics | {"loss": self.loss} | weighted)

    def means(self, num_parts: int) -> tuple[PyTree, dict[str, Array]]:
        """Divides by the weight; returns the gradient of the mean loss, and the metrics.

        Args:
            num_parts: the number of parts that were added up.
        """
        weight = self.loss.weight
        grads = jax.tree.map(lambda g: _divided(g, weight), self.grads)

        def mean(x: Array | Weighted) -> Array:
            if isinstance(x, Weighted):
                return mean_loss(x)
            is_count = jnp.issubdtype(x.dtype, jnp.integer)
            return x if is_count or num_parts == 1 else mean_loss(Weighted(x, weight))

        metrics = {name: mean(x) for name, x in self.metrics.items()}
        return grads, {"loss": mean_loss(self.loss), **metrics}


def forward_of(
    model_spec: ModelSpec, loss_fn: LossFn, change: ModelChange | None = None
) -> Forward:
    """Returns the forward pass of a model as a function of its arrays."""
    return lambda params, buffers, batch: evaluate(
        model_spec, loss_fn, params, buffers, batch, change
    )


def with_frozen(forward: Forward, frozen: PyTree) -> Forward:
    """Returns a forward pass as a function of the trained parameters only.

    Args:
        forward: a function of all parameters.
        frozen: the frozen parameters, which are not differentiated.
    """
    return lambda params, *args: forward(combine(params, frozen), *args)


def gradient_sums(
    forward: Forward,
    num_parts: int,
    scale: Array | None = None,
    common: Callable[[Array], Array | int] | None = None,
) -> Callable[[PyTree, PyTree, Batch], tuple[Sums, PyTree]]:
    """Makes the function that differentiates the loss and returns weighted sums.

    The mean is differentiated rather than the sum, so that gradients keep the scale of a mean in
    half precision; the weight is multiplied in afterwards.

    Args:
        forward: the forward pass.
        num_parts: the number of parts that the batch is cut into: ranks times microbatches. In the
            mean over a part, a sample weighs `num_parts` times as much as in the batch. The loss
            scale is therefore divided by it; half precision would otherwise overflow in a part
            where it does not for the whole batch.
        scale: the loss scale, against vanishing gradients.
        common: returns the weight that all ranks divide by. Required if gradients are reduced
            inside the backward pass, where each rank's own weight can no longer be applied
            afterwards. If it returns 1, the total is differentiated instead of the mean.

    Returns:
        A function of (params, buffers, batch) giving the sums and the new buffers.
    """

    def weight_of(loss):
        weight = loss.weight
        return weight if common is None or is_one(weight) else common(weight)

    per_shard = None if scale is None else scale / num_parts
    differentiate = _differentiated(forward, weight_of, per_shard, _per_weight)

    def sums(params: PyTree, buffers: PyTree, batch: Batch) -> tuple[Sums, PyTree]:
        (_, outcome), grads = differentiate(params, buffers, batch)
        if scale is not None:
            grads = jax.tree.map(lambda g: wide(g) * num_parts, grads)
        weight = weight_of(outcome.loss)
        factor = None if is_one(weight) else _nonzero(weight)

        def weighted(grad):
            grad = wide(grad)
            return grad if factor is None else grad * factor.astype(grad.dtype)

        grads = jax.tree.map(weighted, grads)
        loss = wide_pair(outcome.loss)
        return Sums(grads, loss, shard_metrics(outcome, num_parts)), outcome.buffers

    return sums


def gradient_means(
    forward: Forward, params: PyTree, buffers: PyTree, batch: Batch, scale: Array | None = None
) -> GradientResult:
    """Differentiates the mean loss of a whole batch, without weighting.

    Args:
        forward: the forward pass.
        params: the parameters to differentiate.
        buffers: before the batch.
        batch: what the loss function takes.
        scale: the loss scale.

    Returns:
        Gradients in float32 or wider, metrics, new buffers.
    """
    differentiate = _differentiated(forward, lambda loss: loss.weight, scale, mean_loss)
    (_, outcome), grads = differentiate(params, buffers, batch)
    numbers: dict[str, Array | Weighted] = {"loss": outcome.loss, **outcome.metrics}
    metrics = {name: mean_loss(x) if isinstance(x, Weighted) else x for name, x in numbers.items()}
    return GradientResult(jax.tree.map(wide, grads), metrics, outcome.buffers, numbers)


def _differentiated(
    forward: Forward,
    weight_of: Callable[[Weighted], Any],
    scale: Array | None,
    mean: Callable[[Weighted], Any],
) -> Function:
    def objective(params: PyTree, buffers: PyTree, batch: Batch) -> tuple[Any, Outcome]:
        outcome = forward(params, buffers, batch)
        value = mean(Weighted(outcome.loss.total, weight_of(outcome.loss)))
        # Widen first: the initial scale, 65536, overflows float16.
        return (value if scale is None else wide(value) * scale), outcome

    return jax.value_and_grad(objective, has_aux=True)


def _per_weight(loss: Weighted) -> Array:
    """Returns `total / weight` of a part of a batch, or the total if the weight is 0."""
    return jnp.asarray(loss.total) if is_one(loss.weight) else _quotient(loss)


def _quotient(loss: Weighted) -> Array:
    """Returns `total / weight` in the dtype that JAX gives it, or the total if the weight is 0.

    It is computed in float32 or wider: an integer type would cut the weight, and half precision
    would round it, or overflow.
    """
    weight = _nonzero(loss.weight)
    dtype = jax.eval_shape(jnp.divide, jnp.asarray(loss.total), weight).dtype
    pair = wide_pair(Weighted(loss.total, weight))
    return jnp.asarray(pair.total / pair.weight, dtype)


def _divided(grad: Array, weight: Any) -> Array:
    """Divides a gradient, in float32 or wider, by the weight; keeps its dtype."""
    return jnp.where(weight == 0, 0, grad / _nonzero(weight).astype(grad.dtype))


def wide_number(value: Any) -> Array:
    """Returns a number of a loss function as an array in float32, or its own dtype if wider.

    Example:
        >>> wide_number(True).dtype, wide_number(jnp.float16(1)).dtype
        (dtype('float32'), dtype('float32'))
    """
    return jnp.asarray(value, jnp.result_type(value, jnp.float32))


def wide_pair(value: Weighted) -> Weighted:
    """Returns both numbers as arrays of one dtype: that of their quotient, or float32 if wider."""
    dtype = jnp.result_type(value.total, value.weight, jnp.float32)
    return Weighted(jnp.asarray(value.total, dtype), jnp.asarray(value.weight, dtype))


def _nonzero(weight: Any) -> Array:
    weight = jnp.asarray(weight)
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _shapes(batch: Batch) -> str:
    """Lists the dtypes and shapes of a batch, for error messages."""
    shapes = [(path, f"{x.dtype}{list(x.shape)}") for path, x in leaves_with_paths(batch)]
    return ", ".join(f"{path}: {shape}" if path else shape for path, shape in shapes[:8])


def _kind(value: Any) -> str:
    return f"dtype {value.dtype}" if hasattr(value, "dtype") else f"type {type(value).__name__}"


def _check_scalar(what: str, value: Any) -> None:
    if isinstance(value, (dict, list, tuple, str)) or value is None:
        raise ConfigError(
            f"loss_fn returned a {what} that is a {type(value).__name__}; it must be a scalar. "
            "Give each number its own name, as in {'accuracy/top1': ..., 'accuracy/top5': ...}"
        )
    shape = jnp.shape(value)
    if shape != ():
        raise ConfigError(
            f"loss_fn returned a {what} of shape {shape}; it must be a scalar. Take the mean over "
            "the samples, or return Weighted(total, weight)"
        )
